"""Ends calls whose clients do not read their responses.

A write blocks while the flow-control window of the client's connection is full, over gRPC and HTTP alike. One task
checks all streams once a second. It cancels the request of a blocked stream at the engine, and the task that writes.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

from services.runtime.errors import SlowClient

_CHECK_SECONDS = 1.0


class SlowClientListener(Protocol):
    """Produces the responses for a client."""

    def on_slow_client(self) -> None:
        """Stop producing."""


class ClientStream:
    """Measures how long writes to one client block."""

    def __init__(self, producer: SlowClientListener, on_slow: Callable[[], None], clock: Callable[[], float]) -> None:
        self._producer = producer
        self._on_slow = on_slow
        self._clock = clock
        self._loop = asyncio.get_running_loop()  # current_task() would look it up for each write
        self._writer: asyncio.Task[Any] | None = None
        self._write_started: float | None = None

    def begin_write(self) -> None:
        """Mark the start of a write by the current task."""
        self._writer = asyncio.current_task(self._loop)
        self._write_started = self._clock()

    def end_write(self) -> None:
        """Mark the end of the write."""
        self._write_started = None

    def blocked_seconds(self) -> float:
        """Return the duration of the current write; 0 without one."""
        return 0.0 if self._write_started is None else self._clock() - self._write_started

    def cancel(self) -> "asyncio.Task[Any] | None":
        """Stop the producer, and cancel the task that writes; return that task."""
        self._write_started = None
        self._on_slow()
        self._producer.on_slow_client()
        if self._writer is not None:
            self._writer.cancel()
        return self._writer


class SlowClients:
    """Watches the clients of all streams. `clock` is the event loop's, in seconds."""

    def __init__(self, timeout_seconds: float, clock: Callable[[], float]) -> None:
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._streams: set[ClientStream] = set()
        self._cancelled: WeakSet[asyncio.Task[Any]] = WeakSet()

    @contextmanager
    def watched(self, producer: SlowClientListener, on_slow: Callable[[], None]) -> Iterator[ClientStream]:
        """Watch a client inside the block; call `on_slow` if it is slow."""
        stream = ClientStream(producer, on_slow, self._clock)
        self._streams.add(stream)
        try:
            yield stream
        except SlowClient:
            on_slow()
            raise
        finally:
            self._streams.discard(stream)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the cancellation of a blocked write to SlowClient."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task not in self._cancelled:
                raise
            self._cancelled.discard(task)
            task.uncancel()
            raise SlowClient(f"the client read nothing for more than {self._timeout_seconds:g} s") from None

    async def run(self) -> None:
        """Check all streams once a second, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_SECONDS)
            for stream in [one for one in self._streams if one.blocked_seconds() > self._timeout_seconds]:
                if (task := stream.cancel()) is not None:
                    self._cancelled.add(task)
