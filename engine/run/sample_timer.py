"""Measures the duration of sampling without synchronizing with the device."""

from collections.abc import Callable

import torch

_SECONDS_PER_MILLISECOND = 0.001

Mark = float | torch.cuda.Event


class SampleTimer:
    """Records marks in the order of launched work: events of the current stream on a GPU, times on a CPU."""

    def __init__(self, device: torch.device, clock: Callable[[], float]) -> None:
        """`clock` returns seconds; it is unused on a GPU."""
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._clock = clock

    def mark(self) -> Mark:
        """Record a mark behind all work launched so far."""
        if not self._is_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))  # by default a stream of the thread's current device
        return event


def seconds_between(first: Mark, last: Mark) -> float:
    """Return the device's seconds between two marks; wait until the later one is reached."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(last, torch.cuda.Event), "both marks are of one device"
        last.synchronize()
        return float(first.elapsed_time(last)) * _SECONDS_PER_MILLISECOND
    assert not isinstance(last, torch.cuda.Event), "both marks are of one device"
    return last - first
