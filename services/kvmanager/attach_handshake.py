"""The handshake of an Attach stream: Register, a report in pages, and its adoption, with progress messages."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import Any

from kvmanager import KVManager, PoolReport, Session, adopt
from quire.v1 import kvmanager_pb2 as pb
from services.kvmanager.garbage_collection import freezing
from services.runtime.errors import UnexpectedMessage
from services.wire.attach import kind_of, only_field, read_register
from services.wire.report import ReportReader

# Well below the engines' timeout for progress messages.
_PROGRESS_SECONDS = 1.0
_PAUSE_SECONDS = 0.001

Requests = AsyncIterator[bytes]


class AttachHandshake:
    """One engine's handshake. Concurrent handshakes alternate, slice by slice.

    `report` is the adopted report, `session` the new session, `replaced` the session that it replaced.
    """

    def __init__(self, manager: KVManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._last_progress = clock()
        self._pages = 0
        self._result: Any = None
        self.session: Session | None = None
        self.replaced: Session | None = None
        self.report = PoolReport()

    async def progress(self, requests: Requests) -> AsyncGenerator[pb.PoolResponse]:
        """Read and adopt the report, and yield a progress message every second; set `session` at the end.

        Raises UnexpectedMessage, InvalidField, InvalidRegistration, InvalidReport, StaleIncarnation, SessionReplaced
        and DecodeError.
        """
        spec = read_register(await next_message(requests, "register"))
        registration = self._manager.register(spec)
        try:
            reader = ReportReader(spec)
            self.report = reader.report
            last = False
            while not last:
                data = await next_message(requests, "report")
                async for message in self._in_slices(reader.add(only_field(data, "report"))):
                    self._manager.check_latest(registration)
                    yield message
                last = self._result
                self._pages += 1
                await asyncio.sleep(self._pause_seconds())
            async for message in self._in_slices(freezing(adopt(spec, reader.report))):
                self._manager.check_latest(registration)
                yield message
            self.replaced = self._manager.find_session(spec.engine_id)
            self.session = self._manager.attach(spec, self._result, registration)
        finally:
            self._manager.unregister(registration)

    async def _in_slices(self, work: Generator[None, None, Any]) -> AsyncIterator[pb.PoolResponse]:
        for _ in self._storing_result(work):
            await asyncio.sleep(self._pause_seconds())
            if self._clock() - self._last_progress >= _PROGRESS_SECONDS:
                self._last_progress = self._clock()
                yield pb.PoolResponse(attaching=pb.Attaching(pages=self._pages))

    def _storing_result(self, work: Generator[None, None, Any]) -> Generator[None, None, None]:
        self._result = yield from work

    def _pause_seconds(self) -> float:
        """Return the pause between two slices: 0 if no engine is attached, because then no Step can wait."""
        return _PAUSE_SECONDS if self._manager.sessions() else 0


async def next_message(requests: Requests, kind: str) -> bytes:
    """Return the next message of a stream. Raises UnexpectedMessage unless it is of kind `kind`."""
    async for data in requests:
        if kind_of(data) == kind:
            return data
        raise UnexpectedMessage(f"expected {kind}, got {kind_of(data) or 'an empty message'}")
    raise UnexpectedMessage(f"expected {kind}, but the stream ended")
