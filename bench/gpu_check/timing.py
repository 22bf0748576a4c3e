"""Measures launches on a device: recorded as CUDA graphs, taking turns, by the device's own clock."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

from bench.report import track

Run = Callable[[], object]
Seconds = dict[str, list[float]]


def recorded(run: Run, device: torch.device) -> Run:
    """Return what plays the launches of `run` again from a CUDA graph; on a CPU, `run` itself."""
    if device.type != "cuda":
        return run
    aside = torch.cuda.Stream(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        run()
        run()
    torch.cuda.current_stream(device).wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def take_turns(runs: Mapping[str, Run], repetitions: int, device: torch.device, what: str) -> Seconds:
    """Run all, one after the other, in each repetition; return the seconds of each. The first repetition warms up."""
    seconds: Seconds = {name: [] for name in runs}
    for repetition in track(range(repetitions + 1), what):
        for name, run in runs.items():
            spent = _seconds(run, device)
            if repetition:
                seconds[name].append(spent)
    return seconds


def _seconds(run: Run, device: torch.device) -> float:
    if device.type != "cuda":
        begun = perf_counter()
        run()
        return perf_counter() - begun
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def times_as_fast(seconds: Seconds, ours: str, peer: str) -> float | None:
    """Return how many times as fast as the peer we are: the median over repetitions; None where it did not run."""
    if not seconds.get(peer) or not seconds.get(ours):
        return None
    return round(median(their / our for their, our in zip(seconds[peer], seconds[ours], strict=True)), 3)


@dataclass
class Failures:
    """What could not be measured, and why: a part that fails leaves its rows empty, and the others go on."""

    found: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def kept(self, part: str) -> Iterator[None]:
        """Keep what goes wrong in a part."""
        try:
            yield
        except Exception as failure:
            self.found[part] = f"{type(failure).__name__}: {failure}"
            print(f"{part} failed: {self.found[part]}", flush=True)
