"""Makes the copies of plans, and lets a step wait for those whose blocks it touches."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import NamedTuple

from blocks import Copy
from engine.attention.backend import AttentionBackend, Direction
from engine.errors import CopyFailed
from engine.gpu.copy_stream import CopyStream, Event
from engine.schedule.step_plan import Copies, Work


class _InFlight(NamedTuple):
    """A list of copies between the tiers that was not seen to end, and the device blocks that it reads and writes."""

    event: Event
    reads: frozenset[int]
    writes: frozenset[int]

    def conflicts_with(self, reads: Set[int], writes: Set[int]) -> bool:
        """Return whether work with these device blocks must wait for it. Two may read a block at the same time."""
        return not (self.writes.isdisjoint(reads) and self.writes.isdisjoint(writes) and self.reads.isdisjoint(writes))


class BlockCopies:
    """The copies of one engine, in the order of the answers that asked for them.

    Those between the tiers run on the copy stream, beside the steps. What touches their device blocks next waits for
    them; what touches others does not. Nothing but these copies touches host blocks, and they run one after the other,
    so host blocks are not watched. Copies within the device run where the steps do.

    Every method raises CopyFailed as soon as it is known that a copy failed.
    """

    def __init__(self, backend: AttentionBackend, stream: CopyStream, block_size: int) -> None:
        self._backend = backend
        self._stream = stream
        self._block_size = block_size
        self._in_flight: deque[_InFlight] = deque()

    @property
    def in_flight(self) -> int:
        """Lists of copies that were not seen to end when copies were last made."""
        return len(self._in_flight)

    def make(self, answers: Iterable[Copies]) -> None:
        """Make the copies of each answer, list by list; those between the tiers may be under way afterwards."""
        with _failures():
            self._prune_finished()
            for copies in answers:
                self._swap(copies.device_to_host, Direction.DEVICE_TO_HOST)
                self._swap(copies.host_to_device, Direction.HOST_TO_DEVICE)
                self._copy_blocks(copies.device_to_device)

    def wait_for(self, work: Iterable[Work]) -> None:
        """Let work that is computed next begin after the copies that write what it reads or touch what it writes."""
        if not self._in_flight:
            return
        reads: set[int] = set()
        writes: set[int] = set()
        for item in work:
            first_written = item.start // self._block_size
            reads.update(item.block_table[:first_written])
            writes.update(item.block_table[first_written:])
        with _failures():
            self._wait(reads, writes)

    def _prune_finished(self) -> None:
        while self._in_flight and self._in_flight[0].event.query():
            self._in_flight.popleft()

    def _swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        if not copies:
            return
        event = self._stream.launch(lambda: self._backend.swap(copies, direction))
        if direction is Direction.DEVICE_TO_HOST:
            self._in_flight.append(_InFlight(event, _sources(copies), frozenset()))
        else:
            self._in_flight.append(_InFlight(event, frozenset(), _destinations(copies)))

    def _copy_blocks(self, copies: Sequence[Copy]) -> None:
        if copies:
            self._wait(_sources(copies), _destinations(copies))
            self._backend.copy_blocks(copies)

    def _wait(self, reads: Set[int], writes: Set[int]) -> None:
        for copies in self._in_flight:
            if copies.conflicts_with(reads, writes):
                copies.event.wait()


def _sources(copies: Sequence[Copy]) -> frozenset[int]:
    return frozenset(copy.source for copy in copies)


def _destinations(copies: Sequence[Copy]) -> frozenset[int]:
    return frozenset(copy.destination for copy in copies)


@contextmanager
def _failures() -> Iterator[None]:
    """Whatever goes wrong with a copy, the contents of blocks are not what the books say."""
    try:
        yield
    except Exception as failure:
        raise CopyFailed(f"a copy of blocks failed: {failure}") from failure
