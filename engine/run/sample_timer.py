"""Measures how long the sampling of a step takes, without waiting for it."""

from collections.abc import Callable

import torch

_SECONDS_PER_MILLISECOND = 0.001

Mark = float | torch.cuda.Event


class SampleTimer:
    """Makes marks between what a device is given to do: on a GPU events of the current stream, else times."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        """`clock` gives seconds; on a GPU it is not asked."""
        self._on_gpu = device.type == "cuda"
        self._clock = clock

    def mark(self) -> Mark:
        """Mark the place behind all that was asked for until now."""
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def seconds_between(first: Mark, last: Mark) -> float:
    """Return the seconds that the device took from one mark to a later one; wait until it has come there."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(last, torch.cuda.Event), "both marks are of one device"
        last.synchronize()
        return float(first.elapsed_time(last)) * _SECONDS_PER_MILLISECOND
    assert not isinstance(last, torch.cuda.Event), "both marks are of one device"
    return last - first
