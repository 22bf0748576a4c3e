"""Copies of blocks: beside decoding steps of a model, and alone, compared with one large copy."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from bench.gpu_check import REPETITIONS
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.cases import BLOCK_SIZE, check_tables
from bench.gpu_check.llama_engine import LLAMA_3_8B, TINY, decoders, random_model, runner_of
from bench.gpu_check.notes import Notes
from bench.gpu_check.timing import Run, take_turns, times_as_fast
from blocks import Copy, blocks_for
from engine.attention.backend import Direction
from engine.gpu.triton_backend import TritonBackend
from engine.run.runner import ModelRunner
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Copies, StepPlan, Work


@dataclass(frozen=True)
class CopySizes:
    """A model and its decoding batch; blocks copied in each direction by a step, and alone."""

    config: dict[str, Any]
    batch: int
    context: int
    steps: int
    copied_by_step: int
    copied: int
    repetitions: int


# A quarter of the layers: blocks of 512 KiB.
FULL = CopySizes(LLAMA_3_8B | {"num_hidden_layers": 8}, 32, 1024, 32, 32, 1024, REPETITIONS)
SMALL = CopySizes(TINY, 2, 20, 2, 2, 4, 1)


def measure(sizes: CopySizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Decode with and without copies, then copy alone."""
    loaded = random_model(sizes.config, device)
    held = sizes.batch * blocks_for(sizes.context, BLOCK_SIZE)
    blocks = held + 2 * sizes.copied
    made = decoders(loaded, blocks, (sizes.batch,), device, host_blocks=2 * sizes.copied)
    backend = made.backend
    free = list(range(held + 1, blocks + 1))
    random.Random(1).shuffle(free)
    with notes.kept("copies beside decoding"):
        stepper = _Stepper(runner_of(loaded, made, sizes.batch), sizes, blocks)
        _beside_decoding(stepper, sizes, free, notes)
    if not deadline.passed():
        with notes.kept("copies alone"):
            _alone(backend, sizes, free, device, notes)


class _Stepper:
    """Runs decoding steps, each launched before the one before it has ended, as the engine does."""

    def __init__(self, runner: ModelRunner, sizes: CopySizes, blocks: int) -> None:
        width = blocks_for(sizes.context, BLOCK_SIZE)
        tables = [tuple(range(row * width + 1, (row + 1) * width + 1)) for row in range(sizes.batch)]
        self._work = tuple(
            Work(row, (0,), sizes.context - 1, table, True, Sampling(temperature=0.0))
            for row, table in enumerate(tables)
        )
        check_tables(self._work, blocks)
        self._runner = runner
        self._steps = 0

    def run(self, steps: int, copies: Copies | None = None) -> float:
        """Return the seconds of a step, of which each makes the copies."""
        begun, flight = time.perf_counter(), None
        for _ in range(steps):
            self._steps += 1
            launched = self._runner.launch(StepPlan(self._steps, (copies,) if copies else (), self._work))
            if flight:
                flight.result()
            flight = launched
        assert flight is not None
        flight.result()
        return (time.perf_counter() - begun) / steps


def _beside_decoding(stepper: _Stepper, sizes: CopySizes, free: Sequence[int], notes: Notes) -> None:
    count = sizes.copied_by_step
    copies = Copies(
        tuple(Copy(block, place) for place, block in enumerate(free[:count], 1)),
        tuple(Copy(place, block) for place, block in enumerate(free[count : 2 * count], count + 1)),
    )
    stepper.run(sizes.steps, copies)
    alone, beside = [], []
    for _ in range(sizes.repetitions):
        alone.append(stepper.run(sizes.steps))
        beside.append(stepper.run(sizes.steps, copies))
    notes.raw("copies_beside_decoding", {"alone": alone, "beside": beside})
    slower = median(after / before for before, after in zip(alone, beside, strict=True))
    notes.row("decode_beside_copies_over_alone", round(slower, 3), "ratio", "no copies")
    notes.row("decode_alone_milliseconds_per_step", round(1000 * median(alone), 3), "ms")


def _alone(backend: TritonBackend, sizes: CopySizes, free: Sequence[int], device: torch.device, notes: Notes) -> None:
    count, host = sizes.copied, backend.host_cache
    assert host is not None
    sources, targets, places = free[:count], free[count : 2 * count], list(range(1, count + 1))
    random.Random(2).shuffle(places)
    first = min(free)
    out, back, within = (
        [Copy(*pair) for pair in zip(*pairs, strict=True)]
        for pairs in ((sources, places), (places, targets), (sources, targets))
    )
    runs: dict[str, Run] = {
        "swap_out": lambda: backend.swap(out, Direction.DEVICE_TO_HOST),
        "large_out": lambda: host[1 : count + 1].copy_(backend.cache[first : first + count], non_blocking=True),
        "swap_in": lambda: backend.swap(back, Direction.HOST_TO_DEVICE),
        "large_in": lambda: backend.cache[first : first + count].copy_(host[1 : count + 1], non_blocking=True),
        "copy": lambda: backend.copy_blocks(within),
        "large": lambda: backend.cache[first : first + count].copy_(backend.cache[first + count :]),
    }
    seconds = take_turns(runs, sizes.repetitions, device, "copies")
    notes.raw("copies", seconds)
    notes.row("swap_out_over_one_large_copy", times_as_fast(seconds, "swap_out", "large_out"), "ratio", "torch")
    notes.row("swap_in_over_one_large_copy", times_as_fast(seconds, "swap_in", "large_in"), "ratio", "torch")
    notes.row("copy_over_one_large_copy", times_as_fast(seconds, "copy", "large"), "ratio", "torch")
