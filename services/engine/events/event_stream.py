"""The numbered stream of KV events: its sequence numbers, its bounded history, and its listeners.

A sequence number is never used again, not even after a restart of the engine: the first one is the time of the start
in microseconds, called the epoch. A number below the epoch is another process's, and its state is lost with it.

With 0 as the epoch numbers begin at 0 in each process, as vLLM's do. Then a number does not say whose it is: a
listener notices a restart by a lower number than it has received, or by a lost connection.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple

from services.engine.events.changes import Cleared, KeyChange, Removed, Stored

# Blocks in one batch: with 16 tokens a block some 32 KiB as msgpack. Larger blocks count as several.
MOST_BLOCKS = 256
_BYTES_OF_A_BLOCK = 16 * 4  # of its tokens
# Blocks in the history, some 40 MB: a batch of a step has a few, so usually the number of batches is the limit.
MOST_HISTORY_BLOCKS = 1 << 17


class EventBatch(NamedTuple):
    """Changes, their sequence number, and the time of publication in seconds since 1970. No changes: a heartbeat."""

    sequence: int
    timestamp: float
    changes: Sequence[KeyChange]


class Resumption(NamedTuple):
    """What a listener with a position gets: batches that follow it, or None if it needs a snapshot."""

    batches: "list[EventBatch] | None"
    next_sequence: int


class StreamStats(NamedTuple):
    """What was published since the start, and what is kept: blocks in the keys' places, batches and their age."""

    batches: int = 0
    stored_blocks: int = 0
    removed_blocks: int = 0
    clears: int = 0
    announced_blocks: int = 0
    history_batches: int = 0
    history_seconds: float = 0.0


# Yields the whole state in slices, parents first, beginning with Cleared; MOST_BLOCKS blocks at most in a slice.
Snapshot = Callable[[], Generator[list[KeyChange], None, None]]


class EventStream:
    """Numbers batches, keeps the last ones, and passes each to its listeners. Belongs to the event loop."""

    def __init__(
        self, epoch: int, clock: Callable[[], float], history: int, history_blocks: int = MOST_HISTORY_BLOCKS
    ) -> None:
        """Start with `epoch` as the first sequence number.

        To resume from are kept `history` batches at most, with `history_blocks` blocks at most, and at least the last
        batch. `clock` returns seconds since 1970.
        """
        self.epoch = epoch
        self.next_sequence = epoch
        self.announced_blocks = 0
        self._clock = clock
        self._history: deque[EventBatch] = deque()
        self._most = history, history_blocks
        self._blocks = 0
        self._weight = 1
        self._stored = self._removed = self._clears = 0
        self._listeners: dict[Callable[[EventBatch], None], None] = {}
        self.snapshot: Snapshot = no_blocks

    def publish(self, changes: Sequence[KeyChange]) -> None:
        """Number changes in one batch or several, and pass these to the listeners. No changes make a heartbeat."""
        for part in sliced(changes):
            batch = self.batch(self.next_sequence, part)
            self.next_sequence += 1
            self._count(part)
            self._keep(batch)
            for listener in list(self._listeners):
                listener(batch)

    def batch(self, sequence: int, changes: Sequence[KeyChange]) -> EventBatch:
        """Return a batch of the present time."""
        return EventBatch(sequence, self._clock(), changes)

    def listen(self, listener: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Pass each later batch to a listener, which must not block; return what ends that."""
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)

    def resume(self, first: int) -> Resumption:
        """Return the batches from sequence number `first` on, or None for them if some are not kept any more."""
        if not self.oldest <= first <= self.next_sequence:
            return Resumption(None, self.next_sequence)
        return Resumption(list(islice(self._history, first - self.oldest, None)), self.next_sequence)

    @property
    def from_zero(self) -> bool:
        """Whether the numbers of each process begin at 0."""
        return not self.epoch

    @property
    def oldest(self) -> int:
        """The oldest number from which `resume` has all batches."""
        return self.next_sequence - len(self._history)

    @property
    def state_blocks(self) -> int:
        """The blocks of the state as batches count them: larger ones as several."""
        return self.announced_blocks * self._weight

    @property
    def stats(self) -> StreamStats:
        """What was published, and what is kept."""
        oldest = self._clock() - self._history[0].timestamp if self._history else 0.0
        batches = self.next_sequence - self.epoch
        kept = len(self._history), max(0.0, oldest)
        return StreamStats(batches, self._stored, self._removed, self._clears, self.announced_blocks, *kept)

    def _count(self, changes: Sequence[KeyChange]) -> None:
        for change in changes:
            if isinstance(change, Stored):
                self._stored += len(change.keys)
                self.announced_blocks += len(change.keys)
                self._weight = max(self._weight, _weight(change))
            elif isinstance(change, Removed):
                self._removed += len(change.keys)
                self.announced_blocks = max(0, self.announced_blocks - len(change.keys))
            else:
                self._clears += 1
                self.announced_blocks = 0

    def _keep(self, batch: EventBatch) -> None:
        self._history.append(batch)
        self._blocks += size_of(batch.changes)
        batches, blocks = self._most
        while len(self._history) > batches or (self._blocks > blocks and len(self._history) > 1):
            self._blocks -= size_of(self._history.popleft().changes)


async def beat(stream: EventStream, seconds: float) -> None:
    """Publish a heartbeat whenever nothing was published for `seconds`, until cancelled."""
    while True:
        published = stream.next_sequence
        await asyncio.sleep(seconds)
        if stream.next_sequence == published:
            stream.publish(())


def no_blocks() -> Generator[list[KeyChange], None, None]:
    """Yield the state before there is a pool."""
    yield [Cleared()]


def sliced(changes: Sequence[KeyChange], most: int = MOST_BLOCKS) -> Iterator[Sequence[KeyChange]]:
    """Yield changes in parts of `most` blocks at most, larger changes in pieces. No changes are one empty part."""
    part: list[KeyChange] = []
    blocks = 0
    for change in chain.from_iterable(pieces(one, most) for one in changes):
        more = _blocks_of(change)
        if part and blocks + more > most:
            yield part
            part, blocks = [], 0
        part.append(change)
        blocks += more
    if part or not changes:
        yield part


def pieces(change: KeyChange, most: int) -> Iterator[KeyChange]:
    """Yield a change in pieces of `most` blocks at most, and at least one key. A piece is the next one's parent."""
    size = max(1, most * len(change.keys) // _blocks_of(change)) if not isinstance(change, Cleared) else 1
    if isinstance(change, Cleared) or len(change.keys) <= size:
        yield change
        return
    for start in range(0, len(change.keys), size):
        keys = change.keys[start : start + size]
        if isinstance(change, Removed):
            yield change._replace(keys=keys)
        else:
            parent = change.keys[start - 1] if start else change.parent
            yield change._replace(parent=parent, keys=keys, tokens=change.tokens[start : start + size])


def size_of(changes: Sequence[KeyChange]) -> int:
    """Return the blocks of changes as batches count them."""
    return sum(map(_blocks_of, changes))


def _blocks_of(change: KeyChange) -> int:
    """Return the blocks of a change as batches count them; at least 1."""
    if isinstance(change, Stored):
        return max(1, len(change.keys) * _weight(change))
    return max(1, len(change.keys)) if isinstance(change, Removed) else 1


def _weight(change: Stored) -> int:
    """Return what a block counts: 1 for each 16 tokens."""
    return max(1, len(change.tokens[0]) // _BYTES_OF_A_BLOCK) if change.tokens else 1
