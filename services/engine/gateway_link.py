"""An engine's link to one gateway: outputs queue here, merged, until the stream sends them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Protocol

from quire.v1 import engine_pb2
from services.runtime.errors import SlowClient

_MAX_BACKLOG_BYTES = 8 * 1024 * 1024


class Timers(Protocol):
    """The part of an event loop that Heartbeat needs."""

    def time(self) -> float:
        """Return the loop's time in seconds."""

    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle:
        """Call back after `delay` seconds."""


class Heartbeat:
    """Wakes a link that has waited for output for `seconds`. The body of the context is the wait.

    Its one timer goes on from wait to wait: a timer for each would be set and cancelled with every message.
    """

    def __init__(self, seconds: float, wake: Callable[[], None], loop: Timers) -> None:
        """Start the timer."""
        self._seconds = seconds
        self._wake = wake
        self._loop = loop
        self._due = inf
        self._timer = self._loop.call_later(seconds, self._check)

    def __enter__(self) -> None:
        self._due = self._loop.time() + self._seconds

    def __exit__(self, *_: object) -> None:
        self._due = inf

    def cancel(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _check(self) -> None:
        remaining = self._due - self._loop.time()
        if remaining <= 0:
            self._due = remaining = inf
            self._wake()
        self._timer = self._loop.call_later(min(remaining, self._seconds), self._check)


class GatewayLink:
    """Queue of one stream's outputs, on the event loop. While the stream is behind, steps merge into one message."""

    def __init__(self, max_bytes: int = _MAX_BACKLOG_BYTES) -> None:
        """Make an empty queue that may hold `max_bytes` while the stream is behind."""
        self._max_bytes = max_bytes
        self._backlog: engine_pb2.StepOutput | None = None
        self._backlog_bytes = 0
        self._filled = asyncio.Event()
        self._closing = False
        self._overrun = False
        self._task: asyncio.Task[Any] | None = None
        self._sending = False
        self._on_sent: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Return True if the link was closed and its queue is empty."""
        return self._closing and self._backlog is None

    @contextmanager
    def cancel_on_overrun(self) -> Iterator[None]:
        """Cancel the body of the context, and raise SlowClient, as soon as the queue exceeds its limit.

        The body is usually blocked in a write, because its gateway does not read.
        """
        self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self._overrun or self._task is None:
                raise
            self._task.uncancel()
            raise SlowClient(
                f"the gateway does not read: more than {self._max_bytes} bytes of output are queued"
            ) from None
        finally:
            self._task = None

    def put(self, output: engine_pb2.StepOutput) -> None:
        """Queue the output of one step."""
        if self._overrun:
            return
        if self._backlog is None:
            self._backlog = output
        else:
            self._merge(output)
        self._filled.set()

    def on_sent(self, callback: Callable[[], None]) -> None:
        """Call back once the stream has sent everything queued so far; never if the stream ends before."""
        self._on_sent.append(callback)
        self._call_back_if_sent()

    def wake(self) -> None:
        """Wake the stream, so that it sends a message without output."""
        self._filled.set()

    def close(self) -> None:
        """End the stream after it has sent the queued output."""
        self._closing = True
        self._filled.set()

    async def get(self) -> engine_pb2.StepOutput | None:
        """Wait for output and return all that is queued; return None if woken or closed without any.

        A call implies that the output of the previous call has been sent.
        """
        self._sending = False
        self._call_back_if_sent()
        await self._filled.wait()
        self._filled.clear()
        output, self._backlog, self._backlog_bytes = self._backlog, None, 0
        self._sending = output is not None
        return output

    def _call_back_if_sent(self) -> None:
        if self._sending or self._backlog is not None:
            return
        callbacks, self._on_sent = self._on_sent, []
        for callback in callbacks:
            callback()

    def _merge(self, output: engine_pb2.StepOutput) -> None:
        """Merge into the queued output. Above the limit drop all of it: the stream cannot continue without it."""
        assert self._backlog is not None, "the stream is behind"
        self._backlog_bytes = (self._backlog_bytes or self._backlog.ByteSize()) + output.ByteSize()
        if self._backlog_bytes <= self._max_bytes:
            self._backlog.MergeFrom(output)
            return
        self._overrun, self._backlog = True, None
        if self._task is not None:
            self._task.cancel()
