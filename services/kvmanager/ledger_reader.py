"""Reading the ledger while it is being written: a little at a time, so that no engine waits for a reader."""

import asyncio
from collections.abc import AsyncGenerator

from kvmanager import Ledger
from quire.v1 import kvmanager_pb2 as pb
from services.kvmanager.renderer import summary
from services.kvmanager.slices import run_in_slices
from services.runtime.errors import InvalidField
from services.wire.ledger import event_message

# Events that a watcher is handed before the ledger is asked again whether the next ones are still kept.
_PAGE = 100
# Slices of an explanation between two pauses; each of them looks at one Step, or writes one event.
_SLICES = 50


class LedgerReader:
    """The readers of one ledger. Nothing waits for them; each looks for itself at what has come."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._news: set[asyncio.Event] = set()  # one for each watcher

    def tell(self) -> None:
        """Say that something may have been recorded."""
        self._ledger.flush()
        for news in self._news:
            news.set()

    async def watch(self, from_event: int) -> AsyncGenerator[pb.WatchEventsResponse, None]:
        """Yield kept events from a number on (0: the oldest), then those that come, and say where some were skipped.

        Raises InvalidField for a number that no event has had, except for the next one.
        """
        if not 0 <= from_event <= self._ledger.next_number:
            following = self._ledger.next_number
            raise InvalidField(f"from_event is {from_event}, but the next event will be {following}", "from_event")
        news = asyncio.Event()
        self._news.add(news)
        try:
            async for message in self._follow(from_event or self._ledger.first_kept, news):
                yield message
        finally:
            self._news.remove(news)

    async def _follow(self, number: int, news: asyncio.Event) -> AsyncGenerator[pb.WatchEventsResponse, None]:
        while True:
            news.clear()
            page = self._ledger.events(number, _PAGE)
            if page.first > number:
                yield pb.WatchEventsResponse(skipped_to=page.first)
            number = page.first
            for event in page.events:
                number = event.number + 1
                yield pb.WatchEventsResponse(event=event_message(event))
            if number == self._ledger.next_number:
                await news.wait()

    async def explain(self, request_id: str) -> pb.ExplainResponse:
        """Explain a request, letting others work in between. Raises UnknownRequest."""
        explanation = await run_in_slices(self._ledger.explaining(request_id), _SLICES)
        message = pb.ExplainResponse(summary=summary(explanation))
        for start in range(0, len(explanation.events), _SLICES):
            message.events.extend(map(event_message, explanation.events[start : start + _SLICES]))
            await asyncio.sleep(0)
        return message
