"""Audits every pool in turn, in slices, while block steps are answered in between."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, closing

from kvmanager import Event, KVManager, Session, Violation
from services.runtime.slices import run_in_slices

# Between two slices of a third of a millisecond each: well below one per cent of a core.
_SLICE_PAUSE_SECONDS = 0.05
# Pause after all audits as a multiple of their time, because block steps are slower during an audit.
_PAUSE_FACTOR = 4
_MIN_PAUSE_SECONDS = 1.0
# Violations of one audit that are logged with the events of the block; the others are only counted.
_LOGGED_VIOLATIONS = 10
_LOGGED_EVENTS = 10

log = logging.getLogger("quire.kvmanager")


class Auditor:
    """Audits all pools, and logs the violations."""

    def __init__(self, manager: KVManager, clock: Callable[[], float]) -> None:
        self._manager = manager
        self._clock = clock
        self._requested = asyncio.Lock()  # one at a time, because every audit in progress slows down block steps

    async def run(self) -> None:
        """Audit the pools one after the other, until cancelled."""
        while True:
            begun = self._clock()
            for session in self._manager.sessions():
                await self._audit(session, _SLICE_PAUSE_SECONDS)
            await asyncio.sleep(max(_MIN_PAUSE_SECONDS, _PAUSE_FACTOR * (self._clock() - begun)))

    async def audit(self, session: Session) -> list[Violation]:
        """Audit one pool now, pausing only to let other calls run."""
        async with self._requested:
            return await self._audit(session, 0)

    async def _audit(self, session: Session, pause_seconds: float) -> list[Violation]:
        violations = []
        async with aclosing(self._slices(session, pause_seconds)) as slices:
            async for found in slices:
                violations += found
        await self._log(session, violations)
        return violations

    async def _slices(self, session: Session, pause_seconds: float) -> AsyncGenerator[list[Violation]]:
        with closing(self._manager.audit(session)) as slices:
            for found in slices:
                yield found
                await asyncio.sleep(pause_seconds)

    async def _log(self, session: Session, violations: list[Violation]) -> None:
        engine_id = session.pool.spec.engine_id
        for block, host, message, kind in violations[:_LOGGED_VIOLATIONS]:
            events = await run_in_slices(
                self._manager.ledger.block_events(engine_id, block, host=host, count=_LOGGED_EVENTS, kind=kind)
            )
            withheld = "; it is withheld" if block else ""
            extra = {"engine": engine_id, "block": block, "host": host, "request_ids": _requests(events)}
            values = (engine_id, message, withheld, _listed(events))
            log.error("audit of engine %s: %s%s; last events of the block: %s", *values, extra=extra)
        if len(violations) > _LOGGED_VIOLATIONS:
            log.error("audit of engine %s: %d further violations", engine_id, len(violations) - _LOGGED_VIOLATIONS)


def _requests(events: Iterable[Event]) -> list[str]:
    return list(dict.fromkeys(event.request_id for event in events if event.request_id))


def _listed(events: Iterable[Event]) -> str:
    return ", ".join(_event_text(event) for event in events) or "none"


def _event_text(event: Event) -> str:
    item = event.item.name.lower() if event.item else ""
    return f"{event.number} (step {event.step}, {item} of sequence {event.sequence}, request {event.request_id!r})"
