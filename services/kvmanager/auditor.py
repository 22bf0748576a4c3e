"""The audit that never ends: every pool in turn, a slice at a time, while the engines get their answers."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, closing

from kvmanager import Event, KVManager, Session, Violation
from services.kvmanager.slices import run_in_slices

# Between two slices, each of a third of a millisecond: well below one per cent of a core.
_SLICE_PAUSE_SECONDS = 0.05
# While a pool is audited its Steps cost a little more, so it rests for some times as long as its audit took.
_RESTS = 4
_LEAST_REST_SECONDS = 1.0
# Violations of one audit that are logged with the block's history; the others are counted.
_TOLD_VIOLATIONS = 10
_TOLD_EVENTS = 10

log = logging.getLogger("quire.kvmanager")


class Auditor:
    """Audits all pools, and tells what it found."""

    def __init__(self, manager: KVManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._asked = asyncio.Lock()  # each audit under way makes every Step dearer

    async def run(self) -> None:
        """Audit the pools one after the other, until cancelled."""
        while True:
            begun = self._clock()
            for session in self._manager.sessions():
                await self._audit(session, _SLICE_PAUSE_SECONDS)
            await asyncio.sleep(max(_LEAST_REST_SECONDS, _RESTS * (self._clock() - begun)))

    async def audit(self, session: Session) -> list[Violation]:
        """Audit one pool now, with no more pauses than others need to get their answers."""
        async with self._asked:
            return await self._audit(session, 0)

    async def _audit(self, session: Session, pause_seconds: float) -> list[Violation]:
        violations = []
        async with aclosing(self._slices(session, pause_seconds)) as slices:
            async for found in slices:
                violations += found
        await self._tell(session, violations)
        return violations

    async def _slices(self, session: Session, pause_seconds: float) -> AsyncGenerator[list[Violation]]:
        with closing(self._manager.audit(session)) as slices:
            for found in slices:
                yield found
                await asyncio.sleep(pause_seconds)

    async def _tell(self, session: Session, violations: list[Violation]) -> None:
        engine_id = session.pool.spec.engine_id
        for block, host, sentence in violations[:_TOLD_VIOLATIONS]:
            events = await run_in_slices(
                self._manager.ledger.block_events(engine_id, block, host=host, most=_TOLD_EVENTS)
            )
            withheld = "; it is withheld" if block else ""
            told = {"engine": engine_id, "block": block, "host": host, "request_ids": _requests(events)}
            sentences = (engine_id, sentence, withheld, _told(events))
            log.error("audit of engine %s: %s%s. Last events of it: %s", *sentences, extra=told)
        if len(violations) > _TOLD_VIOLATIONS:
            log.error("audit of engine %s: %d more violations", engine_id, len(violations) - _TOLD_VIOLATIONS)


def _requests(events: Iterable[Event]) -> list[str]:
    return list(dict.fromkeys(event.request_id for event in events if event.request_id))


def _told(events: Iterable[Event]) -> str:
    return ", ".join(_sentence(event) for event in events) or "none"


def _sentence(event: Event) -> str:
    item = event.item.name.lower() if event.item else ""
    return f"{event.number} (step {event.step}, {item} of sequence {event.sequence}, request {event.request_id!r})"
