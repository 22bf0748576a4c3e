"""The handshake of an Attach stream: Register, a report in pages, and its adoption, with progress messages."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from kvmanager import KVManager, PoolReport, Session, adopt
from quire.v1 import kvmanager_pb2 as pb
from services.kvmanager.garbage_collection import freezing
from services.runtime.errors import Overloaded, Unavailable, UnexpectedMessage
from services.wire.attach import kind_of, only_field, read_register
from services.wire.report import ReportReader

# Well below the engines' timeout for progress messages.
_PROGRESS_SECONDS = 1.0
_PAUSE_SECONDS = 0.001

Requests = AsyncIterator[bytes]
_Result = TypeVar("_Result")


class HandshakeLimits(NamedTuple):
    """Limits of the handshakes of all engines. Times are in seconds.

    A handshake ends if the engine sends nothing for `silence`, or lets it wait for messages for `wait` in total. If
    `open` handshakes are open, the one that has waited longest ends for a new one, if it has waited for `grace`.
    """

    silence: float = 10.0
    wait: float = 60.0
    open: int = 64
    grace: float = 1.0


USUAL = HandshakeLimits()


class Handshakes:
    """What the handshakes of all engines share: one slice of work at a time, and their limits."""

    def __init__(self, manager: KVManager, limits: HandshakeLimits) -> None:
        self.limits = limits
        self._manager = manager
        self._open = 0
        self._turns = asyncio.Lock()
        self._waits: dict[asyncio.Timeout, float] = {}  # waits for messages and their begin, the longest first

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Count an open handshake in the context. Raises Overloaded if there are too many."""
        if self._open >= self.limits.open and not self._end_longest_wait():
            raise Overloaded(f"{self._open} engines are attaching, which is the maximum")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def wait(self, message: AsyncIterator[bytes], seconds: float) -> bytes | None:
        """Return the next message of a stream, None at its end. Raises TimeoutError."""
        async with asyncio.timeout(seconds) as timeout:
            self._waits[timeout] = asyncio.get_running_loop().time()
            try:
                return await anext(message, None)
            finally:
                del self._waits[timeout]

    async def next_slice(self, work: Generator[None, None, object]) -> bool:
        """Run one slice of work, when no other handshake does; return whether there are more.

        The pause after it belongs to the turn, so that other engines' block steps wait for at most one slice of all
        handshakes.
        """
        async with self._turns:
            try:
                next(work)
            except StopIteration:
                return False
            await asyncio.sleep(self.pause_seconds)
            return True

    async def run_in_turns(self, work: Generator[None, None, None]) -> None:
        """Run work in slices that take turns with those of handshakes."""
        while await self.next_slice(work):
            pass

    @property
    def pause_seconds(self) -> float:
        """The pause between two slices: 0 if no engine is attached, because then no block step can wait."""
        return _PAUSE_SECONDS if self._manager.sessions() else 0

    def _end_longest_wait(self) -> bool:
        now = asyncio.get_running_loop().time()
        longest = next(iter(self._waits), None)
        if longest is None or now - self._waits[longest] < self.limits.grace:
            return False
        del self._waits[longest]
        self._waits[longest] = now  # last: it ends soon, and another one ends for the next engine
        longest.reschedule(now)
        return True


class AttachHandshake:
    """One engine's handshake. Concurrent handshakes alternate, slice by slice.

    `report` is the adopted report, `session` the new session, `replaced` the session that it replaced.
    """

    def __init__(self, manager: KVManager, handshakes: Handshakes, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._handshakes = handshakes
        self._clock = clock
        self._last_progress = clock()
        self._waited = 0.0
        self._pages = 0
        self._result: Any = None
        self.session: Session | None = None
        self.replaced: Session | None = None
        self.report = PoolReport()

    async def progress(self, requests: Requests) -> AsyncGenerator[pb.PoolResponse]:
        """Read and adopt the report, and yield a progress message every second; set `session` at the end.

        Raises UnexpectedMessage, InvalidField, InvalidRegistration, TooManyBlocks, InvalidReport, StaleIncarnation,
        SessionReplaced, DecodeError, Overloaded, and Unavailable if the engine is silent.
        """
        with self._handshakes.opened():
            spec = read_register(await self._next_message(requests, "register"))
            registration = self._manager.register(spec)
            try:
                reader = ReportReader(spec)
                self.report = reader.report
                last = False
                while not last:
                    data = await self._next_message(requests, "report")
                    self._manager.check_latest(registration)
                    async for message in self._in_slices(reader.add(only_field(data, "report"))):
                        self._manager.check_latest(registration)
                        yield message
                    last = self._result
                    self._pages += 1
                    await asyncio.sleep(self._handshakes.pause_seconds)
                async for message in self._in_slices(freezing(adopt(spec, reader.report))):
                    self._manager.check_latest(registration)
                    yield message
                self.replaced = self._manager.find_session(spec.engine_id)
                self.session = self._manager.attach(spec, self._result, registration)
            finally:
                self._manager.unregister(registration)

    async def _in_slices(self, work: Generator[None, None, Any]) -> AsyncIterator[pb.PoolResponse]:
        slices = self._storing_result(work)
        while await self._handshakes.next_slice(slices):
            if self._clock() - self._last_progress >= _PROGRESS_SECONDS:
                self._last_progress = self._clock()
                yield pb.PoolResponse(attaching=pb.Attaching(pages=self._pages))

    def _storing_result(self, work: Generator[None, None, Any]) -> Generator[None, None, None]:
        self._result = yield from work

    async def _next_message(self, requests: Requests, kind: str) -> bytes:
        """Return the next message of a stream. Raises UnexpectedMessage unless it is a `kind`, and Unavailable."""
        limits, begun = self._handshakes.limits, self._clock()
        try:
            data = await self._handshakes.wait(requests, max(0.0, min(limits.silence, limits.wait - self._waited)))
        except TimeoutError:
            raise Unavailable(
                f"expected {kind}, but the engine sent nothing for {self._clock() - begun:.0f} s"
            ) from None
        self._waited += self._clock() - begun
        if data is None:
            raise UnexpectedMessage(f"expected {kind}, but the stream ended")
        if kind_of(data) != kind:
            raise UnexpectedMessage(f"expected {kind}, got {kind_of(data) or 'an empty message'}")
        return data
