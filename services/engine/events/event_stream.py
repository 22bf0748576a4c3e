"""The numbered stream of KV events: its sequence numbers, its bounded history, and its listeners.

A sequence number is never used again, not even after a restart of the engine: the first one is the time of the start
in microseconds, called the epoch. A number below the epoch is another process's, and its state is lost with it.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

from services.engine.events.changes import Cleared, KeyChange

# Blocks in one batch: with 16 tokens a block some 32 KiB as msgpack.
MOST_BLOCKS = 256


class EventBatch(NamedTuple):
    """Changes with their number, and when they were published, in seconds since 1970. Without changes: a heartbeat."""

    sequence: int
    timestamp: float
    changes: Sequence[KeyChange]


class Resumption(NamedTuple):
    """What a listener with a position gets: batches that follow it, or None if it needs a snapshot."""

    batches: "list[EventBatch] | None"
    next_sequence: int


# Yields the whole state in slices, parents first, beginning with Cleared; MOST_BLOCKS blocks at most in a slice.
Snapshot = Callable[[], Generator[list[KeyChange], None, None]]


class EventStream:
    """Numbers batches, keeps the last ones, and passes each to its listeners. Belongs to the event loop."""

    def __init__(self, epoch: int, clock: Callable[[], float], history: int) -> None:
        """Start with `epoch` as the first sequence number and `history` batches at most to resume from.

        `clock` returns seconds since 1970.
        """
        self.epoch = epoch
        self.next_sequence = epoch
        self._clock = clock
        self._history: deque[EventBatch] = deque(maxlen=history)
        self._listeners: dict[Callable[[EventBatch], None], None] = {}
        self.snapshot: Snapshot = no_blocks

    def publish(self, changes: Sequence[KeyChange]) -> None:
        """Number changes in one batch or several, and pass these to the listeners. No changes make a heartbeat."""
        for part in sliced(changes):
            batch = EventBatch(self.next_sequence, self._clock(), part)
            self.next_sequence += 1
            self._history.append(batch)
            for listener in list(self._listeners):
                listener(batch)

    def listen(self, listener: Callable[[EventBatch], None]) -> Callable[[], None]:
        """Pass each later batch to a listener, which must not block; return what ends that."""
        self._listeners[listener] = None
        return lambda: self._listeners.pop(listener, None)

    def resume(self, first: int) -> Resumption:
        """Return the batches from sequence number `first` on, or None for them if some are not kept any more."""
        oldest = self._history[0].sequence if self._history else self.next_sequence
        if not oldest <= first <= self.next_sequence:
            return Resumption(None, self.next_sequence)
        return Resumption([one for one in self._history if one.sequence >= first], self.next_sequence)


def no_blocks() -> Generator[list[KeyChange], None, None]:
    """Yield the state before there is a pool."""
    yield [Cleared()]


def sliced(changes: Sequence[KeyChange]) -> Iterator[Sequence[KeyChange]]:
    """Yield changes in parts of MOST_BLOCKS blocks at most; one that has more is a part of its own."""
    part: list[KeyChange] = []
    blocks = 0
    for change in changes:
        more = 1 if isinstance(change, Cleared) else len(change.keys)
        if part and blocks + more > MOST_BLOCKS:
            yield part
            part, blocks = [], 0
        part.append(change)
        blocks += more
    if part or not changes:
        yield part
