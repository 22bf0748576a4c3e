"""Ends calls that outlast the grace time of a gateway that stops."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from services.runtime.errors import Unavailable


class UnfinishedCalls:
    """The calls in progress. Closing their server would cancel them, and clients do not retry a cancelled call."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._ended = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the current task inside the block. Raises Unavailable if `end` cancels it."""
        task = asyncio.current_task()
        assert task is not None, "calls are served by tasks"
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._ended:
                raise
            task.uncancel()
            raise Unavailable("the gateway stopped before the request ended") from None
        finally:
            self._tasks.discard(task)

    async def finished(self) -> None:
        """Wait until no call is in progress. The last message of a call is written after its request has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def end(self) -> None:
        """End all calls."""
        self._ended = True
        for task in self._tasks:
            task.cancel()
