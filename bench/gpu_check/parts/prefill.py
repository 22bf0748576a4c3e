"""Attention of prompts, beside torch's flash and cuDNN attention on contiguous memory; then steps of short prompts.

The steps are launched, and replayed by pieces, on a model whose layers take longer to launch than to compute.
"""

from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu_check import REPETITIONS
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.cases import (
    BLOCK_SIZE,
    DTYPE,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    attending,
    batch_of,
    blocks_of,
    queries,
    torchs_attention,
    triton_backend,
)
from bench.gpu_check.llama_engine import LLAMA_1B, TINY, decoders, piecewise, random_model
from bench.gpu_check.notes import Notes
from bench.gpu_check.timing import Run, recorded, take_turns, times_as_fast
from blocks import blocks_for
from engine.attention.backend import PagedBatch
from engine.gpu.llama import LlamaDecoder
from engine.gpu.piecewise import step_sizes
from engine.model.decoder import Decoder


@dataclass(frozen=True)
class PrefillSizes:
    """Prompts by their number of tokens, and the layers of their cache; a model, and prompts that are its steps."""

    prompts: tuple[int, ...]
    layers: int
    repetitions: int
    config: dict[str, Any]
    steps: tuple[int, ...]


FULL = PrefillSizes((8192, 2048), 2, REPETITIONS, LLAMA_1B, (50, 240, 500))
SMALL = PrefillSizes((20,), 1, 1, TINY, (3,))


def measure(sizes: PrefillSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Measure attention, then whole steps."""
    attention(sizes, device, notes, deadline)
    if not deadline.passed():
        with notes.kept("steps of prompts"):
            _steps(sizes, device, notes)


def attention(sizes: PrefillSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Measure prompt after prompt. The rows of the first, longest one have no length in their names."""
    for number, tokens in enumerate(sizes.prompts):
        if not deadline.passed():
            name = f"prefill_{tokens}" if number else "prefill"
            with notes.kept(name):
                _measure(name, tokens, sizes, device, notes)


def _steps(sizes: PrefillSizes, device: torch.device, notes: Notes) -> None:
    """Time a step of one prompt, launched and replayed, for each number of tokens."""
    longest = max(sizes.steps)
    made = decoders(random_model(sizes.config, device), blocks_for(longest, BLOCK_SIZE), (1,), device)
    assert isinstance(made.eager, LlamaDecoder), "only the fused decoder has pieces"
    recorded = piecewise(made, step_sizes(made.eager.layers, made.eager.matrix_elements, longest), device)
    for tokens in sizes.steps:
        ids, positions = torch.zeros(tokens, dtype=torch.int64, device=device), torch.arange(tokens, device=device)
        seconds = take_turns(
            {
                name: partial(_step, decoder, ids, positions, batch_of((tokens,), made.backend.cache, fed=(tokens,)))
                for name, decoder in (("launched", made.eager), ("recorded", recorded))
            },
            sizes.repetitions,
            device,
            f"a step of {tokens} tokens",
        )
        name = f"prompt_step_{tokens}"
        notes.raw(name, seconds)
        notes.row(name, round(median(seconds["recorded"]) * 1000, 3), "ms")
        notes.row(f"{name}_over_launched", times_as_fast(seconds, "recorded", "launched"), "ratio", "launched")


def _step(decoder: Decoder, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> None:
    # A new batch, because a backend keeps the work list of a batch.
    decoder.logits(token_ids, positions, positions[-1:], replace(batch))


def _measure(name: str, tokens: int, sizes: PrefillSizes, device: torch.device, notes: Notes) -> None:
    """A whole prompt, and its second half with the first half cached."""
    backend = triton_backend(blocks_of((tokens,)), sizes.layers, device)
    query = queries(tokens, device)
    whole, half = (batch_of((tokens,), backend.cache, fed=(fed,)) for fed in (tokens, tokens // 2))
    rear = query[tokens - tokens // 2 :]
    # Recorded, because the host launches a short prompt's attention no faster than it is computed.
    runs: dict[str, Run] = {
        "paged": recorded(attending(backend, query, whole, sizes.layers), device),
        "paged_onto_a_prefix": recorded(attending(backend, rear, half, sizes.layers), device),
    }
    shape = (sizes.layers, 1, KV_HEADS, tokens, HEAD_SIZE)
    key, value = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    with notes.kept(f"sdpa, {tokens} tokens"):
        found = torchs_attention(query.transpose(0, 1)[None], key, value, causal=True)
        runs |= {kind: recorded(run, device) for kind, run in found.items()}
    seconds = take_turns(runs, sizes.repetitions, device, name)
    notes.raw(name, seconds)
    operations = 2 * tokens * tokens * HEADS * HEAD_SIZE * sizes.layers
    prefixed = operations * 3 / 4  # the second half of a prompt sees three quarters of all pairs
    notes.row(f"{name}_attention", round(operations / median(seconds["paged"]) / 1e12, 1), "TFLOP/s")
    onto = prefixed / median(seconds["paged_onto_a_prefix"])
    notes.row(f"{name}_attention_onto_a_prefix", round(onto / 1e12, 1), "TFLOP/s")
    notes.row(f"{name}_over_flash_sdpa", times_as_fast(seconds, "paged", "flash"), "ratio", "torch")
    notes.row(f"{name}_over_cudnn_sdpa", times_as_fast(seconds, "paged", "cudnn"), "ratio", "torch")
