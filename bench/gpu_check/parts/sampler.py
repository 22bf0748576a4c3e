"""Sampling of a whole batch from given logits, through the runner that serves requests."""

import time
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from bench.gpu_check import REPETITIONS
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.given_logits import WAYS, GivenLogits, Way, known_tokens, logits_of
from bench.gpu_check.llama_engine import device_sampler
from bench.gpu_check.notes import Notes
from bench.gpu_check.profiles import profiled


@dataclass(frozen=True)
class SamplerSizes:
    """Rows of logits, the vocabulary, and the tokens of a sequence that penalties count."""

    rows: int
    vocabulary: int
    known: int
    repetitions: int


FULL = SamplerSizes(256, 128256, 1200, REPETITIONS)
SMALL = SamplerSizes(2, 300, 8, 1)


def measure(sizes: SamplerSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Measure each way of sampling: device time by the profiler, and a step's time by the clock of the host."""
    logits = logits_of(sizes.rows, sizes.vocabulary, device)
    sampler = device_sampler(sizes.rows, sizes.vocabulary, logits.dtype, device)
    usual, flat = GivenLogits(logits, sampler), GivenLogits(logits / 400, sampler)
    known = known_tokens(sizes.rows, sizes.known, sizes.vocabulary)
    # Of flat rows top-p keeps nearly all tokens.
    cases = [*((name, usual, way) for name, way in WAYS.items()), ("top_p_of_flat_rows", flat, WAYS["top_p"])]
    for name, runner, way in cases:
        if deadline.passed():
            return
        with notes.kept(f"sampler, {name}"):
            runner.sample(way, known)
            wall = [_seconds(runner, way, known) for _ in range(sizes.repetitions)]
            notes.raw(f"sampler_{name}_wall", wall)
            notes.row(f"sampler_{name}_wall_milliseconds", round(1000 * median(wall), 4), "ms")
            use = profiled(partial(_repeat, runner, way, known, sizes.repetitions), device)
            notes.raw(f"sampler_{name}", use)
            notes.row(f"sampler_{name}_milliseconds", round(use.busy / 1000 / sizes.repetitions, 4), "ms")


def _seconds(runner: GivenLogits, way: Way, known: list[tuple[int, ...]]) -> float:
    begun = time.perf_counter()
    runner.sample(way, known)
    return time.perf_counter() - begun


def _repeat(runner: GivenLogits, way: Way, known: list[tuple[int, ...]], repetitions: int) -> None:
    for _ in range(repetitions):
        runner.sample(way, known)
