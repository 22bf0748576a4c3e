"""Attention of prompts, beside torch's flash and cuDNN attention on contiguous memory."""

from dataclasses import dataclass
from statistics import median

import torch

from bench.gpu_check import REPETITIONS
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.cases import (
    DTYPE,
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    SCORING,
    batch_of,
    blocks_of,
    queries,
    torchs_attention,
    triton_backend,
)
from bench.gpu_check.notes import Notes
from bench.gpu_check.timing import Run, take_turns, times_as_fast


@dataclass(frozen=True)
class PrefillSizes:
    """Prompts by their number of tokens, and the layers of their cache."""

    prompts: tuple[int, ...]
    layers: int
    repetitions: int


FULL = PrefillSizes((8192, 2048), 2, REPETITIONS)
SMALL = PrefillSizes((20,), 1, 1)


def measure(sizes: PrefillSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Measure prompt after prompt. The rows of the first, longest one have no length in their names."""
    for number, tokens in enumerate(sizes.prompts):
        if not deadline.passed():
            name = f"prefill_{tokens}" if number else "prefill"
            with notes.kept(name):
                _measure(name, tokens, sizes, device, notes)


def _measure(name: str, tokens: int, sizes: PrefillSizes, device: torch.device, notes: Notes) -> None:
    """A whole prompt, and its second half with the first half cached."""
    backend = triton_backend(blocks_of((tokens,)), sizes.layers, device)
    query = queries(tokens, device)
    whole, half = (batch_of((tokens,), device, fed=(fed,)) for fed in (tokens, tokens // 2))
    rear = query[tokens - tokens // 2 :]
    runs: dict[str, Run] = {
        "paged": lambda: [backend.attend(layer, query, whole, SCORING) for layer in range(sizes.layers)],
        "paged_onto_a_prefix": lambda: [backend.attend(layer, rear, half, SCORING) for layer in range(sizes.layers)],
    }
    shape = (sizes.layers, 1, KV_HEADS, tokens, HEAD_SIZE)
    key, value = (torch.randn(shape, dtype=DTYPE, device=device) for _ in range(2))
    runs |= torchs_attention(query.transpose(0, 1)[None], key, value, causal=True)
    seconds = take_turns(runs, sizes.repetitions, device, name)
    notes.raw(name, seconds)
    operations = 2 * tokens * tokens * HEADS * HEAD_SIZE * sizes.layers
    prefixed = operations * 3 / 4  # the second half of a prompt sees three quarters of all pairs
    notes.row(f"{name}_attention", round(operations / median(seconds["paged"]) / 1e12, 1), "TFLOP/s")
    onto = prefixed / median(seconds["paged_onto_a_prefix"])
    notes.row(f"{name}_attention_onto_a_prefix", round(onto / 1e12, 1), "TFLOP/s")
    notes.row(f"{name}_over_flash_sdpa", times_as_fast(seconds, "paged", "flash"), "ratio", "torch")
    notes.row(f"{name}_over_cudnn_sdpa", times_as_fast(seconds, "paged", "cudnn"), "ratio", "torch")
