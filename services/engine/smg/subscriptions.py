"""KV events for smg, and the load of the engine in between.

A subscriber begins with the batches behind its position, or with a snapshot if they are not kept or it has none. One
that falls behind the bound of its queue does so again. smg counts the copies of a block, so a snapshot is exactly the
state at the number of its last chunk, and no batch up to there follows it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from smg_grpc_proto.generated import common_pb2

from services.engine.events.changes import KeyChange
from services.engine.events.event_stream import EventBatch, EventStream
from services.engine.observer import SmgStats
from services.engine.smg.block_set import BlockSet
from services.engine.smg.kv_messages import events_of
from services.engine.smg.loads import Load, Loads, record_of
from services.engine.smg.subscriber import Subscriber
from services.runtime.errors import Overloaded, SlowClient

MOST_SUBSCRIBERS = 32
# While the load changes without events, it is sent this often.
_RECORD_SECONDS = 0.25
_MOST_SNAPSHOTS = 3  # in a row, to a subscriber that never catches up
_RANK = 0


class _Snapshot(NamedTuple):
    """The state at a sequence number, in parts, and its number of blocks."""

    sequence: int
    parts: Sequence[list[KeyChange]]
    blocks: int


class Subscriptions:
    """All subscribers of an engine. Belongs to the event loop."""

    def __init__(self, stream: EventStream, loads: Loads, most_batches: int, heartbeat_seconds: float) -> None:
        """A queue holds `most_batches`. The load is sent after `heartbeat_seconds` without a message."""
        self._stream = stream
        self._loads = loads
        self._most_batches = most_batches
        self._heartbeat_seconds = heartbeat_seconds
        self._snapshots = asyncio.Lock()  # one at a time: each is a copy of the state
        self.stats = SmgStats()

    async def messages(self, request: common_pb2.SubscribeKvEventsRequest) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Yield the messages of one subscriber, without end. Raises Overloaded and SlowClient."""
        with self._counted():
            subscriber = Subscriber(self._stream, self._most_batches, request.start_sequence_number)
            messages = _Messages(self._loads, early_loads=request.load_records_before_first_batch)
            try:
                async for message in self._messages(subscriber, messages):
                    yield message
            finally:
                subscriber.close()
                self._add(catch_ups=subscriber.take_overruns())

    async def _messages(self, subscriber: Subscriber, messages: "_Messages") -> AsyncIterator[common_pb2.KvEventBatch]:
        snapshots = 0
        while True:
            self._add(catch_ups=subscriber.take_overruns())
            if early := messages.load(self._heartbeat_seconds):
                yield early
            if (batches := subscriber.take()) is None:
                if (snapshots := snapshots + 1) > _MOST_SNAPSHOTS:
                    raise SlowClient("the subscriber does not read: events were dropped before it had the snapshot")
                async for chunk in self._chunks(subscriber, messages):
                    yield chunk
                continue
            for batch in batches:
                yield messages.batch(batch)
            self._add(batches=len(batches))
            snapshots = 0
            await subscriber.wait(_RECORD_SECONDS)

    async def _chunks(self, subscriber: Subscriber, messages: "_Messages") -> AsyncIterator[common_pb2.KvEventBatch]:
        async with self._snapshots:
            snapshot = await self._take_snapshot()
        self._add(snapshots=1)
        for index, part in enumerate(snapshot.parts):
            yield messages.chunk(snapshot, index, part)
        subscriber.continue_behind(snapshot.sequence)

    async def _take_snapshot(self) -> _Snapshot:
        """Collect the state in slices while events go on, which are added as they come."""
        blocks = BlockSet()
        stop = self._stream.listen(lambda batch: blocks.apply(batch.changes))
        try:
            for changes in self._stream.snapshot():
                blocks.apply(changes)
                await asyncio.sleep(0)
        finally:
            stop()
        sequence, parts = self._stream.next_sequence - 1, []
        for part in blocks.parts():
            parts += [part] if part else []
            await asyncio.sleep(0)
        return _Snapshot(sequence, parts, blocks.blocks())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self.stats.subscribers >= MOST_SUBSCRIBERS:
            raise Overloaded(f"there are {MOST_SUBSCRIBERS} subscribers of KV events")
        self._add(subscribers=1)
        try:
            yield
        finally:
            self._add(subscribers=-1)

    def _add(self, **counts: int) -> None:
        self.stats = self.stats._replace(**{name: getattr(self.stats, name) + more for name, more in counts.items()})


class _Messages:
    """Writes the messages of one stream, which count its events and its records of the load."""

    def __init__(self, loads: Loads, *, early_loads: bool) -> None:
        """With `early_loads` the load may precede the first batch."""
        self._loads = loads
        self._sequence: int | None = 0 if early_loads else None
        self._events = self._records = 0
        self._sent: tuple[Load, float] | None = None

    def load(self, heartbeat_seconds: float) -> common_pb2.KvEventBatch | None:
        """Return a message with the load alone, if it has changed or none was sent for this time."""
        if self._sequence is None:
            return None
        load, now = self._loads.load(), time.monotonic()
        if self._sent and self._sent[0].routed == load.routed and now - self._sent[1] < heartbeat_seconds:
            return None
        record = self._record(load, alone=True)
        return common_pb2.KvEventBatch(
            sequence_number=self._sequence, timestamp=time.time(), dp_rank=_RANK, load=record
        )

    def batch(self, batch: EventBatch) -> common_pb2.KvEventBatch:
        """Return a batch of the stream."""
        message = self._message(batch.sequence, batch.timestamp, batch.changes)
        for event in message.events:
            self._events += 1
            event.event_id = self._events
        return message

    def chunk(self, snapshot: _Snapshot, index: int, part: Sequence[KeyChange]) -> common_pb2.KvEventBatch:
        """Return a part of a snapshot. The last one has the number of the state."""
        count = len(snapshot.parts)
        message = self._message(snapshot.sequence - count + 1 + index, time.time(), part)
        message.snapshot.index, message.snapshot.count = index, count
        message.snapshot.blocks, message.snapshot.unknown_before = snapshot.blocks, 0
        return message

    def _message(self, sequence: int, timestamp: float, changes: Sequence[KeyChange]) -> common_pb2.KvEventBatch:
        self._sequence = sequence
        record = self._record(self._loads.load(), alone=False)
        return common_pb2.KvEventBatch(
            sequence_number=sequence, timestamp=timestamp, events=events_of(changes), dp_rank=_RANK, load=record
        )

    def _record(self, load: Load, *, alone: bool) -> common_pb2.EngineLoad:
        self._records += 1
        self._sent = load, time.monotonic()
        return record_of(load, self._records, alone=alone)
