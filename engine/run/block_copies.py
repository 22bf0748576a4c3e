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

# Blocks of one launch. A step waits for whole launches, and 64 blocks of 2 MiB take some 3 ms on a bus of 50 GB/s.
_LAUNCHED_BLOCKS = 64


class _InFlight(NamedTuple):
    """Copies of one direction in flight, and the blocks of each tier that they read or write."""

    event: Event
    device: frozenset[int]
    host: frozenset[int]


class BlockCopies:
    """The block copies of one engine, in the order of the results that requested them.

    Copies between the tiers run on the copy stream, concurrently with steps. Later work on their blocks waits for them:
    steps and copies within the device, which run on the compute stream, and copies of the other direction. Other work
    does not. Copies of the same direction run one after the other.

    Each method raises CopyFailed as soon as a copy is known to have failed.
    """

    def __init__(self, backend: AttentionBackend, stream: CopyStream, block_size: int, kind: int = 0) -> None:
        """Copy the blocks of one kind, those of `backend`."""
        self._backend = backend
        self._kind = kind
        self._stream = stream
        self._block_size = block_size
        self._to_host: deque[_InFlight] = deque()
        self._to_device: deque[_InFlight] = deque()

    @property
    def in_flight(self) -> int:
        """Number of launched copies between the tiers in flight at the latest `make`."""
        return len(self._to_host) + len(self._to_device)

    def make(self, answers: Sequence[Copies]) -> None:
        """Run the copies of each result, list by list. Copies between the tiers may still be in flight afterwards."""
        if not answers and not self.in_flight:
            return
        with _failures():
            for launched in (self._to_host, self._to_device):
                while launched and launched[0].event.query():
                    launched.popleft()
            for answer in answers:
                copies = answer.windows[self._kind - 1] if self._kind else answer
                for part in _launches(copies.device_to_host):
                    self._copy_to_host(part)
                for part in _launches(copies.host_to_device):
                    self._copy_to_device(part)
                self._copy_blocks(copies.device_to_device)

    def wait_for(self, work: Iterable[Work]) -> None:
        """Delay work launched next until copies that conflict with it are done."""
        if not self.in_flight:
            return
        reads: set[int] = set()
        writes: set[int] = set()
        for item in work:
            first_written = item.start // self._block_size
            table = item.window_tables[self._kind - 1] if self._kind else item.block_table
            reads.update(table[:first_written])
            writes.update(table[first_written:])
        with _failures():
            self._wait(reads, writes)

    def _copy_to_host(self, copies: Sequence[Copy]) -> None:
        device, host = _sources(copies), _destinations(copies)
        event = self._swap(copies, Direction.DEVICE_TO_HOST, _sharing(self._to_device, device, host))
        self._to_host.append(_InFlight(event, device, host))

    def _copy_to_device(self, copies: Sequence[Copy]) -> None:
        device, host = _destinations(copies), _sources(copies)
        event = self._swap(copies, Direction.HOST_TO_DEVICE, _sharing(self._to_host, device, host))
        self._to_device.append(_InFlight(event, device, host))

    def _swap(self, copies: Sequence[Copy], direction: Direction, earlier: Sequence[Event]) -> Event:
        """Launch copies of one direction that wait for `earlier` ones of the other."""

        def copy() -> None:
            for event in earlier:
                event.wait()
            self._backend.swap(copies, direction)

        return self._stream.launch(copy, direction)

    def _copy_blocks(self, copies: Sequence[Copy]) -> None:
        if copies:
            self._wait(_sources(copies), _destinations(copies))
            self._backend.copy_blocks(copies)

    def _wait(self, reads: Set[int], writes: Set[int]) -> None:
        """Delay work on the compute stream. Two readers of a block do not conflict."""
        for copies in self._to_host:
            if not copies.device.isdisjoint(writes):
                copies.event.wait()
        for copies in self._to_device:
            if not (copies.device.isdisjoint(reads) and copies.device.isdisjoint(writes)):
                copies.event.wait()


def _sharing(launched: Iterable[_InFlight], device: Set[int], host: Set[int]) -> list[Event]:
    """Return the events of copies that share a block with copies of the other direction: one of both writes it."""
    return [one.event for one in launched if not (one.device.isdisjoint(device) and one.host.isdisjoint(host))]


def _launches(copies: Sequence[Copy]) -> Iterator[tuple[Copy, ...]]:
    starts = range(0, len(copies), _LAUNCHED_BLOCKS)
    return (tuple(copies[start : start + _LAUNCHED_BLOCKS]) for start in starts)


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
