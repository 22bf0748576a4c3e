"""Where copies between the tiers run: at once, or on a stream of the accelerator's own, beside what it computes."""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """Tells when what was launched on a stream has ended. Either call may raise what made it fail."""

    def query(self) -> bool:
        """Return whether it has ended. Does not wait."""

    def wait(self) -> None:
        """Let nothing that is computed from now on begin before it has ended.

        On an accelerator this holds up the stream of the computation, on the CPU whoever calls.
        """


class CopyStream(Protocol):
    """Runs what is launched on it one after the other, in the order of the launches."""

    def launch(self, copy: Callable[[], None]) -> Event:
        """Begin a copy after all that was computed until now, and return the event of its end.

        `copy` does what it does on the current stream. Raises what `copy` raises, where that is known at once.
        """


class _Ended:
    """The event of what has ended."""

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        return


class InlineCopyStream:
    """Does everything at once, in the place of the caller."""

    def launch(self, copy: Callable[[], None]) -> Event:
        """Copy, and return when that is done or queued before all that is computed from now on."""
        copy()
        return _Ended()


class CudaCopyStream:
    """A CUDA stream beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self, copy: Callable[[], None]) -> Event:
        """Queue a copy behind all that is queued on the current stream until now."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
            event: Event = self._stream.record_event()
            return event


def copy_stream_for(device: torch.device) -> CopyStream:
    """Return a stream beside the computation where the device has streams, else one that does everything at once."""
    return CudaCopyStream(device) if device.type == "cuda" else InlineCopyStream()
