"""Notices that a deadline passed, in whatever way a call learns of it."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.runtime.errors import DeadlinePassed

# A client hangs up by its own clock, which began before the call reached the gateway.
_EARLY_SECONDS = 0.1


@dataclass(frozen=True)
class Deadline:
    """When a request has to be done, in seconds of `clock`; None: it has time."""

    at: float | None
    clock: Callable[[], float]

    @contextmanager
    def told(self, passed: Callable[[], None]) -> Iterator[None]:
        """Call `passed` if what is done inside ends because the deadline passed.

        A call is also cancelled by gRPC, or left by its client, when that happens.
        """
        try:
            yield
        except DeadlinePassed:
            passed()
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if self.at is not None and self.clock() > self.at - _EARLY_SECONDS:
                passed()
            raise
