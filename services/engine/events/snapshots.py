"""Snapshots as ordinary batches, so that consumers which know only replays need nothing new.

The sequence numbers of a snapshot's batches are consecutive and end at the last one before it began, as if the whole
state had been announced just then. They begin no lower than the number that the consumer asked for, because consumers
skip numbers that they had. Numbers that remain are those of batches without changes.
"""

from collections.abc import Generator, Sequence
from typing import NamedTuple

from services.engine.events.changes import KeyChange
from services.engine.events.event_stream import MOST_BLOCKS, EventBatch, EventStream, sliced

# Numbers beyond twice those of the blocks at the beginning, for blocks that come while the snapshot is made.
_SPARE = 8


class SnapshotOutgrown(Exception):
    """The state grew to more batches than there are numbers for."""


class Numbering(NamedTuple):
    """The first number of a snapshot, the first after it, and the blocks of each batch."""

    first: int
    end: int
    blocks: int

    @classmethod
    def of(cls, blocks: int, asked: int, end: int) -> "Numbering":
        """Choose numbers in `asked` <= number < `end` for a state of `blocks` blocks; few numbers make large batches.

        If `asked` leaves none, they begin below it.
        """
        room = end - max(asked, 0) if asked < end else end
        wanted = min(room, 2 * -(-blocks // MOST_BLOCKS) + _SPARE)
        return cls(end - wanted, end, max(MOST_BLOCKS, 2 * -(-blocks // max(1, wanted - _SPARE))))


def snapshot(stream: EventStream, asked: int) -> Generator[EventBatch | None, None, None]:
    """Yield the state of a stream as batches that end before its next sequence number as of now.

    None ends a slice of work that fills no batch. `asked` is the number that the consumer wants next. Changes that are
    published meanwhile are in the state or not: whoever reads the snapshot applies the batches since its beginning
    after it. Raises SnapshotOutgrown.
    """
    numbering = Numbering.of(stream.announced_blocks, asked, stream.next_sequence)
    sequence = numbering.first
    for part in _joined(stream.snapshot(), numbering.blocks):
        if part is None:
            yield None
            continue
        if sequence >= numbering.end:
            raise SnapshotOutgrown(f"the snapshot has more than {numbering.end - numbering.first} batches")
        yield stream.batch(sequence, part)
        sequence += 1
    for unused in range(sequence, numbering.end):
        yield stream.batch(unused, [])


def _joined(
    slices: Generator[list[KeyChange], None, None], most: int
) -> Generator[Sequence[KeyChange] | None, None, None]:
    """Yield the changes of slices in parts of about `most` blocks, so that few numbers suffice; None after a slice."""
    pending: Sequence[KeyChange] = []
    for changes in slices:
        *whole, pending = sliced([*pending, *changes], most)
        yield from whole
        yield None
    if pending:
        yield pending
