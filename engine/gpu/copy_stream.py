"""Copies between the tiers: inline, or on streams of the accelerator for each direction, beside its computation."""

from collections.abc import Callable
from typing import Protocol

import torch

from engine.attention.backend import Direction


class Event(Protocol):
    """Completion of a launched copy. Both methods may raise the error of the copy."""

    def query(self) -> bool:
        """Return whether the copy has ended, without waiting."""

    def wait(self) -> None:
        """Delay what is launched next until the copy has ended.

        On an accelerator this blocks the current stream, on the CPU the caller.
        """


class CopyStream(Protocol):
    """Runs launched copies: those of one direction one after the other, the two directions at the same time."""

    def launch(self, copy: Callable[[], None], direction: Direction) -> Event:
        """Start a copy after all computation launched so far, and return its completion event.

        `copy` works on the current stream, and may wait for events of the other direction. Raises the error of `copy`
        if it is known immediately.
        """


class _Ended:
    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return


class InlineCopyStream:
    """Runs copies immediately, in the caller."""

    def launch(self, copy: Callable[[], None], direction: Direction) -> Event:  # noqa: ARG002
        """Copy, and return when the copy is done or queued before all later computation."""
        copy()
        return _Ended()


class _CudaEvent:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def query(self) -> bool:
        ended: bool = self._event.query()  # type: ignore[no-untyped-call]
        return ended

    def wait(self) -> None:
        # Without an argument it would be a stream of the thread's current device.
        self._event.wait(torch.cuda.current_stream(self._device))


class CudaCopyStream:
    """Two CUDA streams besides that of the computation, because the bus carries both directions at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {one: torch.cuda.Stream(device) for one in Direction}  # type: ignore[no-untyped-call]

    def launch(self, copy: Callable[[], None], direction: Direction) -> Event:
        """Queue a copy behind all work queued on the current stream so far."""
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy()
            return _CudaEvent(stream.record_event(), self._device)


def copy_stream_for(device: torch.device) -> CopyStream:
    """Return separate streams if the device has streams, else one that copies inline."""
    return CudaCopyStream(device) if device.type == "cuda" else InlineCopyStream()
