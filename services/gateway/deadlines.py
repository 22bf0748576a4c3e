"""When a request has to be done, and that this was noticed in whatever way its call learns of it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.runtime.errors import DeadlineExceeded

# A client hangs up by its own clock, which began before the call reached the gateway.
_EARLY_SECONDS = 0.1


@dataclass(frozen=True)
class Deadline:
    """A point in time, in seconds of `clock`; None: there is no hurry."""

    at: float | None
    clock: Callable[[], float]

    @classmethod
    def after(cls, start: float, timeout: float | None, clock: Callable[[], float]) -> "Deadline":
        """Return that of what began at `start` and may take so many seconds."""
        return cls(None if timeout is None else start + timeout, clock)

    def seconds_left(self) -> float | None:
        """Return the seconds until then, none of them below 0."""
        return None if self.at is None else max(0.0, self.at - self.clock())

    @contextmanager
    def noticed(self, passed: Callable[[], None]) -> Iterator[None]:
        """Call `passed` if what is done inside ends because the deadline passed.

        A call is also cancelled by gRPC, or left by its client, when that happens.
        """
        try:
            yield
        except DeadlineExceeded:
            passed()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if self.at is not None and self.clock() > self.at - _EARLY_SECONDS:
                passed()
            raise
