"""Reads the ledger in slices, so that readers do not delay block steps."""

import asyncio
from collections.abc import AsyncGenerator

from kvmanager import Ledger
from quire.v1 import kvmanager_pb2 as pb
from services.kvmanager.renderer import summary
from services.runtime.errors import InvalidField
from services.runtime.slices import run_in_slices
from services.wire.ledger import event_message

# Events that are sent to a watcher before the ledger is read again.
_PAGE = 100
# Slices of an explanation between two pauses; each slice reads one entry or makes one event.
_SLICES = 50


class LedgerReader:
    """Serves the watchers of one ledger, and explanations. Recording never waits for a reader."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._watchers: set[asyncio.Event] = set()

    def notify(self) -> None:
        """Wake the watchers after events may have been recorded."""
        self._ledger.flush()
        for recorded in self._watchers:
            recorded.set()

    async def watch(self, from_event: int) -> AsyncGenerator[pb.WatchEventsResponse, None]:
        """Yield kept events from number `from_event` on (0: the oldest), then new ones, and a message for each gap.

        Raises InvalidField if the number is higher than that of the next event.
        """
        if not 0 <= from_event <= self._ledger.next_number:
            next_number = self._ledger.next_number
            raise InvalidField(f"from_event must be between 0 and {next_number}, not {from_event}", "from_event")
        recorded = asyncio.Event()
        self._watchers.add(recorded)
        try:
            async for message in self._follow(from_event or self._ledger.first_kept, recorded):
                yield message
        finally:
            self._watchers.remove(recorded)

    async def _follow(self, number: int, recorded: asyncio.Event) -> AsyncGenerator[pb.WatchEventsResponse, None]:
        while True:
            recorded.clear()
            page = self._ledger.events(number, _PAGE)
            if page.first > number:
                yield pb.WatchEventsResponse(skipped_to=page.first)
            number = page.first
            for event in page.events:
                number = event.number + 1
                yield pb.WatchEventsResponse(event=event_message(event))
            if number == self._ledger.next_number:
                await recorded.wait()

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        """Explain a request in slices. Raises UnknownRequest."""
        explanation = await run_in_slices(self._ledger.explaining(request_id), _SLICES)
        message = pb.ExplainResponse(summary=summary(explanation))
        for start in range(0, len(explanation.events), _SLICES):
            message.events.extend(map(event_message, explanation.events[start : start + _SLICES]))
            await asyncio.sleep(0)
        return message
