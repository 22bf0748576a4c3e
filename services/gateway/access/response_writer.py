"""Writes the responses of a call; a write goes on while the next response is awaited."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

_Message = TypeVar("_Message")


class ResponseWriter(Generic[_Message]):
    """Writes messages through `write`, which awaits one future for each, as grpc.aio's does.

    The caller waits for the first write, which sends the metadata of the call. After it, `begin` returns while the
    message is on its way, so that no task wakes up when it has left.
    """

    def __init__(self, write: Callable[[_Message], Coroutine[Any, Any, None]]) -> None:
        self._write = write
        self._is_first = True
        self._error: Exception | None = None  # of a write that could not begin
        self._writing: Coroutine[Any, Any, None] | None = None
        self._written: asyncio.Future[None] | None = None  # of `_writing`

    @property
    def ready(self) -> bool:
        """Whether a message can be written at once: the one before has left without an error."""
        if self._written is None:
            return not self._is_first and self._error is None
        return self._written.done() and self._written.exception() is None

    def begin(self, message: _Message) -> None:
        """Begin a write while `ready`. `finish` raises its error."""
        if (writing := self._writing) is not None:
            self._writing = self._written = None
            _end(writing)
        writing = self._write(message)
        try:
            self._written = writing.send(None)
            self._writing = writing
        except StopIteration:  # it needs no waiting
            pass
        except Exception as error:
            self._error = error

    async def write(self, message: _Message) -> None:
        """Wait for the write before, and begin this one. Raises the error of the one before."""
        await self.finish()
        self.begin(message)
        if self._is_first:
            await self.finish()
            self._is_first = False

    async def finish(self) -> None:
        """Wait for the current write, if any. Raises its error."""
        if self._error is not None:
            raise self._error
        if self._written is not None and not self._written.done():
            await _suspended(self._written)
        writing, self._writing, self._written = self._writing, None, None
        if writing is not None:
            _end(writing)

    def close(self) -> None:
        """Forget the current write. The message is still sent, but nobody waits for that."""
        if self._writing is not None and self._written is not None:
            if not self._written.cancel() and not self._written.cancelled():
                self._written.exception()  # asyncio would log an error that nobody has retrieved
            self._writing.close()
            self._writing = self._written = None


def _end(writing: Coroutine[Any, Any, None]) -> None:
    """Let a write, whose future is done, run to its end. Raises its error."""
    try:
        writing.send(None)
    except StopIteration:
        return


@types.coroutine
def _suspended(written: asyncio.Future[None]) -> Generator[Any, None, None]:
    """Suspend the task as the write would have: it has marked its future as awaited, which is done once."""
    yield written
