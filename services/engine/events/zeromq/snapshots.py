"""Snapshots as ordinary batches, so that consumers which support only replays need nothing new.

The numbers of a snapshot's batches begin at the one that the consumer asked for, because consumers skip numbers that
they had, and rise one by one. So they are those of batches that are not kept: a consumer that loses the connection in
the middle asks for the next one, and gets a new snapshot, not the batches since the middle of this one. After the state
comes a batch without changes, with the last number before the snapshot began.

Some consumers take only consecutive numbers (llm-d's router 0.10, vllm-router 0.1.17), so where numbers begin at 0 the
numbers between are those of batches without changes too (`consecutive`). One of these may be the number of a batch that
is kept: a consumer that loses the connection among them has the whole state, and continues with the batches since that
one. It has the changes of some of them already; the last change of each key wins. If the wanted number is too far back,
the snapshot begins just before the batches that are kept.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

from services.engine.events.changes import KeyChange
from services.engine.events.event_stream import MOST_BLOCKS, EventBatch, EventStream, size_of, sliced

# Sizes of batches to choose from, if there are few numbers.
_SIZES = (MOST_BLOCKS, 4 * MOST_BLOCKS, 16 * MOST_BLOCKS)
# Numbers behind the wanted one that are filled.
MOST_FILLED = 1 << 18
# Numbers beyond twice those of the blocks at the beginning, for blocks that come while the snapshot is made.
_SPARE = 8


class SnapshotOutgrown(Exception):
    """The state grew to more batches than there are numbers for."""


class Numbering(NamedTuple):
    """The first number of a snapshot, its last one, and the most blocks of a batch."""

    first: int
    last: int
    blocks: int

    @classmethod
    def of(cls, stream: EventStream, asked: int) -> "Numbering":
        """Choose numbers for the state of a stream from `asked` on; from 0 if a snapshot has no room behind it."""
        blocks, last = stream.state_blocks, stream.next_sequence - 1
        first = asked if 0 <= asked < last else 0
        if stream.from_zero and last - first > MOST_FILLED:
            first = max(first, stream.oldest - _numbers(blocks, MOST_BLOCKS))
        fitting = (size for size in _SIZES if first + _numbers(blocks, size) <= stream.oldest)
        room = max(1, last - first - _SPARE)
        return cls(first, last, max(next(fitting, _SIZES[-1]), -(-2 * blocks // room)))


def make_room(stream: EventStream) -> None:
    """Publish batches without changes until there are numbers for a snapshot, where they began at 0 a moment ago."""
    while stream.next_sequence <= _SPARE:
        stream.publish(())


def snapshot(stream: EventStream, asked: int) -> Generator[EventBatch | None, None, None]:
    """Yield the state of a stream as batches. The last batch has the newest number of the stream.

    None ends a slice of work that fills no batch. `asked` is the number that the consumer wants next. Changes that are
    published meanwhile are in the state or not: whoever reads the snapshot applies the batches since its beginning
    after it. Raises SnapshotOutgrown.
    """
    numbering = Numbering.of(stream, asked)
    sequence = numbering.first
    for part in _joined(stream.snapshot(), numbering.blocks):
        if part is None:
            yield None
            continue
        if sequence >= numbering.last:
            raise SnapshotOutgrown(f"the snapshot has more than {numbering.last - numbering.first} batches")
        yield stream.batch(sequence, part)
        sequence += 1
    yield stream.batch(numbering.last, [])


def consecutive(snapshot: Iterable[EventBatch | None]) -> Iterator[EventBatch | range | None]:
    """Yield the batches of a snapshot, and the numbers before the last one that none of them has, if not too many."""
    following = None
    for batch in snapshot:
        if batch is not None:
            unused = range(batch.sequence if following is None else following, batch.sequence)
            if 0 < len(unused) <= MOST_FILLED:
                yield unused
            following = batch.sequence + 1
        yield batch


def _numbers(blocks: int, size: int) -> int:
    """Return the numbers that a snapshot of this many blocks may use."""
    return 2 * -(-blocks // size) + _SPARE


def _joined(
    slices: Generator[list[KeyChange], None, None], most: int
) -> Generator[Sequence[KeyChange] | None, None, None]:
    """Yield the changes of slices in parts of about `most` blocks, so that few numbers suffice; None after a slice."""
    pending: list[KeyChange] = []
    blocks = 0
    for changes in slices:
        pending += changes
        blocks += size_of(changes)
        if blocks >= most:
            *whole, rest = sliced(pending, most)
            yield from whole
            pending, blocks = list(rest), size_of(rest)
        yield None
    if pending:
        yield pending
