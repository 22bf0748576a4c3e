"""Deadlines of requests."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.runtime.errors import DeadlineExceeded

# A client's own deadline starts before its call reaches the gateway, so it cancels a little earlier.
_CLIENT_LEAD_SECONDS = 0.1


@dataclass(frozen=True)
class Deadline:
    """A point in time, in seconds of `clock`; None: no deadline."""

    at: float | None
    clock: Callable[[], float]

    @classmethod
    def after(cls, start: float, timeout: float | None, clock: Callable[[], float]) -> "Deadline":
        """Return the deadline `timeout` seconds after `start`."""
        return cls(None if timeout is None else start + timeout, clock)

    def seconds_left(self) -> float | None:
        """Return the remaining seconds, at least 0."""
        return None if self.at is None else max(0.0, self.at - self.clock())

    @contextmanager
    def reported(self, on_exceeded: Callable[[], None]) -> Iterator[None]:
        """Call `on_exceeded` if the block ends because of the deadline.

        The block then ends by DeadlineExceeded or by its cancellation: at the deadline gRPC may cancel the call, or the
        client may disconnect, before DeadlineExceeded is raised.
        """
        try:
            yield
        except DeadlineExceeded:
            on_exceeded()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if self.at is not None and self.clock() > self.at - _CLIENT_LEAD_SECONDS:
                on_exceeded()
            raise
