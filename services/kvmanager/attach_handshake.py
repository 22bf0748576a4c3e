"""The beginning of an Attach stream: Register, a report in pages, and its adoption, with signs of progress."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import Any

from kvmanager import KVManager, PoolReport, Session, adopt
from quire.v1 import kvmanager_pb2 as pb
from services.kvmanager.garbage_collection import freezing
from services.runtime.errors import UnexpectedMessage
from services.wire.attach import kind_of, only_field, read_register
from services.wire.report import ReportReader

# Well within what engines wait for a sign of progress.
_PROGRESS_SECONDS = 1.0
_POLITE_SECONDS = 0.001

Requests = AsyncIterator[bytes]


class AttachHandshake:
    """One engine's way to its session. Attaches under way take turns, slice by slice.

    `report` is what was adopted, `replaced` the session in whose place the new one is.
    """

    def __init__(self, manager: KVManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._told = clock()
        self._pages = 0
        self._result: Any = None
        self.session: Session | None = None
        self.replaced: Session | None = None
        self.report = PoolReport()

    async def progress(self, requests: Requests) -> AsyncGenerator[pb.PoolResponse]:
        """Read and adopt, and yield a message from time to time; at the end there is a session.

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
                async for sign in self._in_slices(reader.add(only_field(data, "report"))):
                    self._manager.check_latest(registration)
                    yield sign
                last = self._result
                self._pages += 1
                await asyncio.sleep(self._politeness())
            async for sign in self._in_slices(freezing(adopt(spec, reader.report))):
                self._manager.check_latest(registration)
                yield sign
            self.replaced = self._manager.find_session(spec.engine_id)
            self.session = self._manager.attach(spec, self._result, registration)
        finally:
            self._manager.unregister(registration)

    async def _in_slices(self, work: Generator[None, None, Any]) -> AsyncIterator[pb.PoolResponse]:
        for _ in self._keeping(work):
            await asyncio.sleep(self._politeness())
            if self._clock() - self._told >= _PROGRESS_SECONDS:
                self._told = self._clock()
                yield pb.PoolResponse(attaching=pb.Attaching(pages=self._pages))

    def _keeping(self, work: Generator[None, None, Any]) -> Generator[None, None, None]:
        self._result = yield from work

    def _politeness(self) -> float:
        """Return how long to pause between two slices: not at all while no engine can be waiting."""
        return _POLITE_SECONDS if self._manager.sessions() else 0


async def next_message(requests: Requests, kind: str) -> bytes:
    """Return the next message of a stream. Raises UnexpectedMessage unless it is of this kind."""
    async for data in requests:
        if kind_of(data) == kind:
            return data
        raise UnexpectedMessage(f"expected {kind}, got {kind_of(data) or 'an empty message'}")
    raise UnexpectedMessage(f"expected {kind}, but the stream ended")
