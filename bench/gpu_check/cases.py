"""Attention with the heads of Llama-3-8B: caches, batches, and what torch offers for the same."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from bench.gpu_check.timing import Run
from blocks import blocks_for
from engine.attention.backend import AttentionBackend, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry, LayerShape
from engine.attention.flex_backend import FlexBackend
from engine.gpu.triton_backend import TritonBackend
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work

Backend = TypeVar("Backend", TritonBackend, FlexBackend)

DTYPE = torch.bfloat16
KV_HEADS, GROUP, HEAD_SIZE = 8, 4, 128
HEADS = KV_HEADS * GROUP
SHAPE = LayerShape(KV_HEADS, HEAD_SIZE, HEAD_SIZE)
SCORING = Scoring(HEAD_SIZE**-0.5)
BLOCK_SIZE = 16


def triton_backend(
    blocks: int,
    layers: int,
    device: torch.device,
    block_size: int = BLOCK_SIZE,
    host_blocks: int = 0,
    shape: LayerShape = SHAPE,
) -> TritonBackend:
    """Return a backend whose cache has random contents."""
    geometry = CacheGeometry((shape,) * layers)
    return _random(TritonBackend(geometry, block_size, blocks, DTYPE, device, host_blocks))


def flex_backend(blocks: int, layers: int, device: torch.device, block_size: int) -> FlexBackend:
    """Return a backend of FlexAttention whose cache has random contents."""
    return _random(FlexBackend(CacheGeometry.uniform(layers, KV_HEADS, HEAD_SIZE), block_size, blocks, DTYPE, device))


def blocks_of(lengths: Sequence[int], block_size: int = BLOCK_SIZE) -> int:
    """Return the blocks of sequences with these lengths."""
    return sum(blocks_for(length, block_size) for length in lengths)


def batch_of(
    lengths: Sequence[int],
    cache: torch.Tensor,
    *,
    fed: Sequence[int] = (),
    block_size: int = BLOCK_SIZE,
    mixed: bool = True,
) -> PagedBatch:
    """Return a step over sequences of these lengths. With `mixed`, their blocks are scattered over the cache.

    Each feeds one token unless `fed` has a number for each. Raises AssertionError if the cache has too few blocks.
    """
    blocks = list(range(1, blocks_of(lengths, block_size) + 1))
    if mixed:
        random.Random(1).shuffle(blocks)
    work, begin = [], 0
    for number, length in enumerate(lengths):
        count = fed[number] if fed else 1
        table = tuple(blocks[begin : begin + blocks_for(length, block_size)])
        work.append(Work(number, (0,) * count, length - count, table, True, Sampling()))
        begin += len(table)
    return laid_out(work, cache, block_size)


def laid_out(work: Sequence[Work], cache: torch.Tensor, block_size: int = BLOCK_SIZE) -> PagedBatch:
    """Return the batch of a step in a cache, `[1 + blocks, ...]`. Raises AssertionError if it lacks a table's block."""
    check_tables(work, len(cache) - 1)
    return PagedBatch.of(work, block_size, cache.device)


def check_tables(work: Sequence[Work], blocks: int) -> None:
    """Raise AssertionError if a table names a block outside of 1 to `blocks`: kernels would use other memory."""
    outside = sorted({block for one in work for block in one.block_table if not 1 <= block <= blocks})
    assert not outside, f"tables name blocks {outside[:8]} outside of a pool with blocks 1 to {blocks}"


def queries(tokens: int, device: torch.device, size: int = HEAD_SIZE) -> torch.Tensor:
    """Return random queries, `[tokens, heads, size]`."""
    return torch.randn(tokens, HEADS, size, dtype=DTYPE, device=device)


def attending(backend: AttentionBackend, query: torch.Tensor, batch: PagedBatch, layers: int) -> Run:
    """Return one step's attention in all layers. Ours plans its work each time, as in each step."""

    def run() -> None:
        step = replace(batch) if isinstance(backend, TritonBackend) else batch
        for layer in range(layers):
            backend.attend(layer, query, step, SCORING)

    return run


def kv_bytes(lengths: Sequence[int]) -> int:
    """Return the bytes of K and V of one layer that a decoding step reads."""
    return 2 * sum(lengths) * KV_HEADS * HEAD_SIZE * DTYPE.itemsize


def torchs_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> dict[str, Run]:
    """Return the kernels of torch that accept these tensors, in all layers. The first dimension of K and V is layers.

    On a CPU, torch's plain attention takes the place of flash.
    """
    flash = SDPBackend.FLASH_ATTENTION if query.device.type == "cuda" else SDPBackend.MATH
    found: dict[str, Run] = {}
    for name, kind in (("flash", flash), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
        run = _sdpa(kind, query, key, value, causal=causal)
        try:
            run()
        except RuntimeError as refused:
            print(f"torch has no {name} attention for this: {refused}")
        else:
            found[name] = run
    return found


def _sdpa(kind: SDPBackend, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, causal: bool) -> Run:
    def run() -> None:
        with sdpa_kernel(kind):
            for layer in range(len(key)):
                scaled_dot_product_attention(query, key[layer], value[layer], is_causal=causal, enable_gqa=True)

    return run


def _random(backend: Backend) -> Backend:
    backend.cache.normal_()
    return backend
