"""The place of one subscriber in an engine's stream of KV events."""

import asyncio
from collections import deque
from collections.abc import Sequence

from services.engine.events.event_stream import EventBatch, EventStream


class Subscriber:
    """Queues batches for one subscriber, and reads from the stream's history what the queue does not hold."""

    def __init__(self, stream: EventStream, most_batches: int, first: int) -> None:
        """Begin at sequence number `first`; 0, as every number of another process, needs a snapshot first."""
        self._stream = stream
        self._most_batches = most_batches
        self._next = first
        self._behind = True  # the queue does not continue what was taken
        self._waiting: deque[EventBatch] = deque()
        self._woken = asyncio.Event()
        self._overruns = 0
        self.close = stream.listen(self._put)

    def take(self) -> Sequence[EventBatch] | None:
        """Return the next batches; None if a snapshot must come first."""
        self._woken.clear()
        if not self._behind:
            batches = list(self._waiting)
        elif (kept := self._stream.resume(self._next).batches) is None:
            return None
        else:
            batches, self._behind = kept, False
        self._waiting.clear()
        self._next = batches[-1].sequence + 1 if batches else self._next
        return batches

    def take_overruns(self) -> int:
        """Return how often more batches came than the queue holds, since the last call."""
        overruns, self._overruns = self._overruns, 0
        return overruns

    def continue_behind(self, sequence: int) -> None:
        """Continue with the batch behind a sequence number, which the subscriber has."""
        self._next, self._behind = sequence + 1, True

    async def wait(self, seconds: float) -> bool:
        """Wait for a batch, for at most this time; return whether there is one."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return False
        return True

    def _put(self, batch: EventBatch) -> None:
        if not self._behind and len(self._waiting) == self._most_batches:
            self._behind, self._overruns = True, self._overruns + 1
            self._waiting.clear()
        if not self._behind:
            self._waiting.append(batch)
        self._woken.set()
