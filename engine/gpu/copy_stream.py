"""Copies between the tiers: inline, or on a separate stream of the accelerator, concurrent with its computation."""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """Completion of work launched on a stream. Both methods may raise the error of the work."""

    def query(self) -> bool:
        """Return whether the work has ended, without waiting."""

    def wait(self) -> None:
        """Delay all later computation until the work has ended.

        On an accelerator this blocks the compute stream, on the CPU the caller.
        """


class CopyStream(Protocol):
    """Runs launched copies one after the other, in launch order."""

    def launch(self, copy: Callable[[], None]) -> Event:
        """Start a copy after all computation launched so far, and return its completion event.

        `copy` works on the current stream. Raises the error of `copy` if it is known immediately.
        """


class _Ended:
    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return


class InlineCopyStream:
    """Runs copies immediately, in the caller."""

    def launch(self, copy: Callable[[], None]) -> Event:
        """Copy, and return when the copy is done or queued before all later computation."""
        copy()
        return _Ended()


class CudaCopyStream:
    """A CUDA stream separate from the compute stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self, copy: Callable[[], None]) -> Event:
        """Queue a copy behind all work queued on the current stream so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
            event: Event = self._stream.record_event()
            return event


def copy_stream_for(device: torch.device) -> CopyStream:
    """Return a separate stream if the device has streams, else one that copies inline."""
    return CudaCopyStream(device) if device.type == "cuda" else InlineCopyStream()
