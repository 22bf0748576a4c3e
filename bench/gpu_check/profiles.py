"""When a device was busy, from the activities that the profiler records with the clock of the device.

Events around Python code would count the device as busy while it waits for a launch inside of them.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

# Gaps that the host causes are longer. The kernels of a recorded graph follow each other within 1 to 3 us.
HOST_GAP = 10.0
_NO_KERNELS = ("Memcpy", "Memset", "ProfilerStep")


class Span(NamedTuple):
    """An activity, in microseconds."""

    begin: float
    end: float


class Occupancy(NamedTuple):
    """Use of a device from its first to its last kernel, in microseconds.

    `busy`: time with one kernel or more. `gaps`: sum of the idle intervals that are longer than HOST_GAP.
    """

    wall: float
    busy: float
    gaps: float

    @property
    def idle_share(self) -> float:
        """Share of the time without a kernel."""
        return 1 - self.busy / self.wall

    @property
    def idle_share_between_steps(self) -> float:
        """Share of the idle intervals that are longer than HOST_GAP."""
        return self.gaps / self.wall


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans: disjoint ones, in order. Spans that touch are joined."""
    union: list[Span] = []
    for span in sorted(spans):
        if union and span.begin <= union[-1].end:
            union[-1] = Span(union[-1].begin, max(union[-1].end, span.end))
        else:
            union.append(span)
    return union


def occupancy(spans: Iterable[Span], host_gap: float = HOST_GAP) -> Occupancy:
    """Return how the device was used. Raises ValueError without any activity."""
    union = merged(spans)
    if not union:
        raise ValueError("the profiler recorded no kernel")
    pauses = [after.begin - before.end for before, after in pairwise(union)]
    return Occupancy(
        wall=union[-1].end - union[0].begin,
        busy=sum(span.end - span.begin for span in union),
        gaps=sum(pause for pause in pauses if pause > host_gap),
    )


def profiled(run: Callable[[], object], device: torch.device) -> Occupancy:
    """Run a function, and return how it used the device. On a CPU operators take the place of kernels."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        run()
        if cuda:
            torch.cuda.synchronize(device)  # pragma: no cover - CUDA
    wanted = "CUDA" if cuda else "CPU"
    return occupancy(
        Span(event.time_range.start, event.time_range.end)
        for event in recorded.events()
        if event.device_type.name == wanted and is_kernel(event.name)
    )


def is_kernel(activity: str) -> bool:
    """Return whether an activity of this name computes, so that copies beside the computation are not counted."""
    return not activity.startswith(_NO_KERNELS)
