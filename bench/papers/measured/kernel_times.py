"""Seconds of the decode attention kernel, on blocks and on contiguous memory.

Each measurement covers all layers of a model with the demo model's heads, so that no layer's K and V are still in the
fast caches when it is measured again.
"""

import os

# As in the engine's process, and before torch is imported: threads that wait actively take the cores of the next way.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from bench.engine.kernels import DTYPE, GROUP, HEAD_SIZE, KV_HEADS, LAYERS, SCORING, Ways, decoding_step, take_turns
from bench.papers.case import Values
from bench.report.terms import Terms
from blocks import blocks_for
from engine.attention.cache import CacheGeometry
from engine.native.cpu_backend import CpuBackend
from engine.native.kernels import PACKED_SIZE, Kernels
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache

BLOCK_SIZE = 16


def paged_and_contiguous(sequences: Sequence[int], contexts: Sequence[int], repetitions: int) -> Values:
    """Return the seconds of each way, by batch size and context.

    `paged`: blocks of 16 tokens in random order. `in_order`: the same blocks in order. `one_block`: the same kernel,
    with a block of the context's length for each sequence, which is contiguous memory. `sdpa`: torch's attention on
    contiguous memory.
    """
    kernels = load_kernels(str(default_cache().parent / "kernels"))
    sizes = [(batch, context) for batch in sequences for context in contexts]
    seconds = {
        f"b{batch}_c{context}": take_turns(_ways(kernels, batch, context), range(repetitions + 1))
        for batch, context in sizes
    }
    return {"seconds": seconds, "layers": LAYERS, "cpu_class": kernels.cpu.name, "terms": _terms()}


def by_block_size(sequences: int, context: int, block_sizes: Sequence[int], layers: int, repetitions: int) -> Values:
    """Return the seconds of the kernel on blocks in random order, by block size.

    `packed` are the block sizes whose K and V the kernels keep in the layout of matrix products; other sizes run on a
    slower path.
    """
    kernels = load_kernels(str(default_cache().parent / "kernels"))
    query = _query(sequences)
    ways: Ways = {
        str(size): _attention(kernels, query, context, size, layers=layers, shuffled=True) for size in block_sizes
    }
    seconds = take_turns(ways, range(repetitions + 1))
    packed = [size for size in block_sizes if size % PACKED_SIZE == 0]
    return {
        "seconds": seconds,
        "layers": layers,
        "packed": packed,
        "cpu_class": kernels.cpu.name,
        "terms": _terms(),
    }


def _terms() -> dict[str, Any]:
    """Return the terms of all ways: there are no weights."""
    dtype = str(DTYPE).removeprefix("torch.")
    terms = Terms(activations=dtype, kv_cache=dtype, threads=torch.get_num_threads(), work="attention of a step")
    return asdict(terms)


def _ways(kernels: Kernels, sequences: int, context: int) -> Ways:
    query = _query(sequences)
    return {
        "paged": _attention(kernels, query, context, BLOCK_SIZE, shuffled=True),
        "in_order": _attention(kernels, query, context, BLOCK_SIZE, shuffled=False),
        "one_block": _attention(kernels, query, context, context, shuffled=False),
        "sdpa": _contiguous(query, context),
    }


def _query(sequences: int) -> torch.Tensor:
    return torch.randn(sequences, KV_HEADS * GROUP, HEAD_SIZE, dtype=DTYPE)


def _attention(
    kernels: Kernels,
    query: torch.Tensor,
    context: int,
    block_size: int,
    *,
    shuffled: bool,
    layers: int = LAYERS,
) -> Callable[[], object]:
    """Return a decoding step's attention in all layers, over a cache of its own."""
    geometry = CacheGeometry.uniform(layers, KV_HEADS, HEAD_SIZE)
    count = len(query) * blocks_for(context, block_size)
    backend = CpuBackend(kernels, geometry, block_size, count, DTYPE, threads=torch.get_num_threads())
    backend.cache.normal_()
    blocks = list(range(1, count + 1))
    if shuffled:
        random.Random(1).shuffle(blocks)
    step = decoding_step(blocks, len(query), context, block_size)
    return lambda: [backend.attend(layer, query, step, SCORING) for layer in range(layers)]


def _contiguous(query: torch.Tensor, context: int) -> Callable[[], object]:
    """Return torch's attention in all layers. The query heads of one KV head are rows of one matrix."""
    shape = (LAYERS, 2, len(query), KV_HEADS, context, HEAD_SIZE)
    contiguous = torch.randn(shape, dtype=DTYPE)
    packed = query.view(len(query), KV_HEADS, GROUP, HEAD_SIZE)
    return lambda: [
        scaled_dot_product_attention(packed, key, value, scale=SCORING.scaling) for key, value in contiguous
    ]
