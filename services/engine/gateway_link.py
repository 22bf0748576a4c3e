"""An engine's link to one gateway: outputs wait here, merged, until the stream takes them."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from quire.v1 import engine_pb2
from services.runtime.errors import SlowClient

_LONGEST_BACKLOG_BYTES = 8 * 1024 * 1024


class GatewayLink:
    """Outputs of one stream. Lives on the event loop; one message per step, or one for all steps while it is behind."""

    def __init__(self, most_bytes: int = _LONGEST_BACKLOG_BYTES) -> None:
        """Let so many bytes wait at most while the stream is behind."""
        self._most_bytes = most_bytes
        self._backlog: engine_pb2.StepOutput | None = None
        self._backlog_bytes = 0
        self._filled = asyncio.Event()
        self._closing = False
        self._overrun = False
        self._task: asyncio.Task[Any] | None = None
        self._sending = False
        self._when_sent: list[Callable[[], None]] = []

    @property
    def closed(self) -> bool:
        """Whether it was closed, and all that was pushed before is taken."""
        return self._closing and self._backlog is None

    @contextmanager
    def bounded(self) -> Iterator[None]:
        """Leave what the present task does inside, with SlowClient, as soon as more waits than may.

        That is as a rule a write: the stream is behind because its gateway does not read.
        """
        self._task = asyncio.current_task()
        try:
            yield
        except asyncio.CancelledError:
            if not self._overrun or self._task is None:
                raise
            self._task.uncancel()
            raise SlowClient(f"more than {self._most_bytes} bytes of output waited for being read") from None
        finally:
            self._task = None

    def push(self, output: engine_pb2.StepOutput) -> None:
        """Add the news of one step."""
        if self._overrun:
            return
        if self._backlog is None:
            self._backlog = output
        else:
            self._merge(output)
        self._filled.set()

    def when_sent(self, callback: Callable[[], None]) -> None:
        """Call back when the stream has sent all that was pushed so far; never if it ends before."""
        self._when_sent.append(callback)
        self._call_back_if_sent()

    def wake(self) -> None:
        """Let the stream say at once what it says with every message."""
        self._filled.set()

    def close(self) -> None:
        """Let the stream end when it has sent what waits."""
        self._closing = True
        self._filled.set()

    async def take(self) -> engine_pb2.StepOutput | None:
        """Wait for output and return all that waits; None when woken or closed without any.

        Whoever takes again has sent what was taken before.
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
        callbacks, self._when_sent = self._when_sent, []
        for callback in callbacks:
            callback()

    def _merge(self, output: engine_pb2.StepOutput) -> None:
        """Add to what waits; where that becomes too much, drop it all: the stream cannot go on without it."""
        assert self._backlog is not None, "the stream is behind"
        self._backlog_bytes = (self._backlog_bytes or self._backlog.ByteSize()) + output.ByteSize()
        if self._backlog_bytes <= self._most_bytes:
            self._backlog.MergeFrom(output)
            return
        self._overrun, self._backlog = True, None
        if self._task is not None:
            self._task.cancel()
