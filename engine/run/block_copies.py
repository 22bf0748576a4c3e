"""Runs the block copies of plans, and delays steps until copies of their blocks are done."""

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
    """Copies between the tiers in flight, and the device blocks that they read and write."""

    event: Event
    reads: frozenset[int]
    writes: frozenset[int]

    def conflicts_with(self, reads: Set[int], writes: Set[int]) -> bool:
        """Return whether work on these device blocks must wait. Two readers of a block do not conflict."""
        return not (self.writes.isdisjoint(reads) and self.writes.isdisjoint(writes) and self.reads.isdisjoint(writes))


class BlockCopies:
    """The block copies of one engine, in the order of the results that requested them.

    Copies between the tiers run on the copy stream, concurrently with steps. Later work on their device blocks waits
    for them; other work does not. Host blocks are touched by these copies only, which run one after the other, so they
    need no tracking. Copies within the device run on the compute stream.

    Each method raises CopyFailed as soon as a copy is known to have failed.
    """

    def __init__(self, backend: AttentionBackend, stream: CopyStream, block_size: int) -> None:
        self._backend = backend
        self._stream = stream
        self._block_size = block_size
        self._in_flight: deque[_InFlight] = deque()

    @property
    def in_flight(self) -> int:
        """Number of copy lists in flight at the latest `make`."""
        return len(self._in_flight)

    def make(self, answers: Sequence[Copies]) -> None:
        """Run the copies of each result, list by list. Copies between the tiers may still be in flight afterwards."""
        if not answers and not self._in_flight:
            return
        with _failures():
            self._prune_finished()
            for copies in answers:
                self._swap(copies.device_to_host, Direction.DEVICE_TO_HOST)
                self._swap(copies.host_to_device, Direction.HOST_TO_DEVICE)
                self._copy_blocks(copies.device_to_device)

    def wait_for(self, work: Iterable[Work]) -> None:
        """Delay work launched next until copies that conflict with it are done."""
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
    try:
        yield
    except Exception as failure:
        raise CopyFailed(f"block copy failed: {failure}") from failure
