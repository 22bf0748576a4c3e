"""Measures alternating launches on a device, recorded as CUDA graphs, with the clock of the device."""

from collections.abc import Callable, Mapping
from functools import cache
from statistics import median
from time import perf_counter

import torch

from bench.report.results import track
from engine.gpu.graphs import CudaRecorder, Recorder, Recording

Run = Callable[[], object]
Seconds = dict[str, list[float]]


@cache
def recorder(device: torch.device) -> Recorder:
    """Return a recorder of CUDA graphs; on a CPU a tape that keeps equally few tensors alive."""
    if device.type == "cuda":
        return CudaRecorder(device)  # pragma: no cover - CUDA
    from tests.engine.launch_tape import LaunchTape

    return LaunchTape()


def recorded(run: Run, device: torch.device) -> Run:
    """Return a function that replays the launches of `run`, and keeps their tensors."""
    return Recording(run, recorder(device))


def take_turns(runs: Mapping[str, Run], repetitions: int, device: torch.device, what: str) -> Seconds:
    """Run all in each repetition; return the seconds of each. The first repetition is a warm-up."""
    seconds: Seconds = {name: [] for name in runs}
    for repetition in track(range(repetitions + 1), what):
        for name, run in runs.items():
            spent = seconds_of(run, device)
            if repetition:
                seconds[name].append(spent)
    return seconds


def seconds_of(run: Run, device: torch.device) -> float:
    """Run it once, and return its seconds by the clock of the device."""
    if device.type != "cuda":
        begun = perf_counter()
        run()
        return perf_counter() - begun
    return _seconds_there(run)  # pragma: no cover - CUDA


def _seconds_there(run: Run) -> float:  # pragma: no cover - CUDA
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def times_as_fast(seconds: Seconds, ours: str, peer: str) -> float | None:
    """Return our speed over the peer's: the median over repetitions, or None if the peer did not run."""
    if not seconds.get(peer) or not seconds.get(ours):
        return None
    return round(median(their / our for their, our in zip(seconds[peer], seconds[ours], strict=True)), 3)
