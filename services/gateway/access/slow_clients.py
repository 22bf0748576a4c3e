"""Ends the calls of clients that do not read what is sent to them.

A call that writes into the full window of a client's connection waits there, whatever the protocol. One task looks once
a second for those that have waited too long; it ends the request at the engine and cancels the task that waits.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

from services.runtime.errors import SlowClient

_LOOK_SECONDS = 1.0


class Stoppable(Protocol):
    """What works for a client."""

    def on_slow_client(self) -> None:
        """Stop working."""


class Reader:
    """A client, as seen from the task that writes to it."""

    def __init__(self, generation: Stoppable, on_slow: Callable[[], None], clock: Callable[[], float]) -> None:
        self._generation = generation
        self._on_slow = on_slow
        self._clock = clock
        self._task: asyncio.Task[Any] | None = None
        self._writing_since: float | None = None

    def begin(self) -> None:
        """The present task begins to write."""
        self._task = asyncio.current_task()
        self._writing_since = self._clock()

    def end(self) -> None:
        """What was written has been taken."""
        self._writing_since = None

    def waiting_seconds(self) -> float:
        """How long the write under way has taken so far; 0 without one."""
        return 0.0 if self._writing_since is None else self._clock() - self._writing_since

    def give_up(self) -> "asyncio.Task[Any] | None":
        """Stop the work for it, and the task that writes; return that."""
        self._writing_since = None
        self._on_slow()
        self._generation.on_slow_client()
        if self._task is not None:
            self._task.cancel()
        return self._task


class SlowClients:
    """Watches the clients of all streams. `clock` is the event loop's, in seconds."""

    def __init__(self, patience_seconds: float, clock: Callable[[], float]) -> None:
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._readers: set[Reader] = set()
        self._given_up: WeakSet[asyncio.Task[Any]] = WeakSet()

    @contextmanager
    def watched(self, generation: Stoppable, on_slow: Callable[[], None]) -> Iterator[Reader]:
        """Watch a client for as long as it is served; `on_slow` is called if it is slow."""
        reader = Reader(generation, on_slow, self._clock)
        self._readers.add(reader)
        try:
            yield reader
        except SlowClient:
            on_slow()
            raise
        finally:
            self._readers.discard(reader)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Make a SlowClient of the cancellation of a task that wrote to a slow client."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task not in self._given_up:
                raise
            self._given_up.discard(task)
            task.uncancel()
            raise SlowClient(f"nothing was read for more than {self._patience_seconds:g} s") from None

    async def run(self) -> None:
        """Look after all of them until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for reader in [one for one in self._readers if one.waiting_seconds() > self._patience_seconds]:
                if (task := reader.give_up()) is not None:
                    self._given_up.add(task)
