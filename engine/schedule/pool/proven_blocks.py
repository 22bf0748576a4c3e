"""Compares what groups are admitted with, before anything is computed from it, and withdraws wrong blocks.

A checksum cannot find a block that was sealed wrong, so the blocks of some hits are computed again and compared. A
recomputation is a request of its own that shares no block and gives none a key. It is the last in the order, so that
it runs when nothing else waits, and is preempted first. There is one at a time.
"""

from collections.abc import Sequence

from engine.schedule.live_requests import LiveRequests
from engine.schedule.pool.admission import Admitted
from engine.schedule.pool.block_planner import BlockPlanner
from engine.schedule.pool.condemnations import (
    AdmittedBlocks,
    Proof,
    WrongBlock,
    admitted_blocks,
    may_have_been_read,
)
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group

_REQUEST_PREFIX = "recompute:"
# No client can send it: \xfe is not UTF-8.
_SALT = b"\xfe"
_LAST = 1 << 30


class ProvenBlocks:
    """Proves the blocks of answers. Groups that hold a wrong one wait again before anything is computed from it."""

    def __init__(
        self, queue: RequestQueue, view: PoolView, requests: LiveRequests, blocks: BlockPlanner, proof: Proof
    ) -> None:
        """`proof` makes the copies of answers, which then are in no plan, and compares blocks."""
        self._queue = queue
        self._view = view
        self._requests = requests
        self._blocks = blocks
        self._proof = proof
        self._recomputations = Recomputations(queue, view, requests, proof)

    def check(self, admitted: Sequence[Admitted], now: float) -> None:
        """Make the copies of an answer, and compare what its groups were admitted with."""
        arrivals = [arrival for one in admitted for arrival in admitted_blocks(*one, self._view.block_size)]
        self.condemn(self._proof.check(self._blocks.take_copies(), arrivals), now)
        for arrival in arrivals:
            sequence = self._queue.find(arrival.sequence)
            if sequence is not None and self._queue.runs(sequence.group):
                self._recomputations.consider(sequence.group, arrival, now)

    def compare(self, group: Group, now: float) -> None:
        """Compare the blocks of a hit with those that a recomputation has computed."""
        self.condemn(self._recomputations.compare(group), now)

    def condemn(self, wrong: Sequence[WrongBlock], now: float) -> None:
        """Withdraw wrong blocks; clear the prefix cache if one of them may have been read."""
        if wrong:
            self._requests.condemn(self._blocks.condemn(wrong, now), now, reset=any(map(may_have_been_read, wrong)))


class Recomputations:
    """Starts recomputations of hits that a proof chooses, and compares what they computed."""

    def __init__(self, queue: RequestQueue, view: PoolView, requests: LiveRequests, proof: Proof) -> None:
        self._queue = queue
        self._view = view
        self._requests = requests
        self._proof = proof
        self._started = 0
        self._hit: AdmittedBlocks | None = None  # what the recomputation is compared with

    def consider(self, group: Group, hit: AdmittedBlocks, now: float) -> None:
        """Compute the blocks that a group has hit again, if they are chosen and nothing else is computed again."""
        if hit.swapped_in or self._live or self._requests.draining or not self._proof.chooses_recomputation():
            return
        blocks = len(hit.tables[0])
        request = Request(
            request_id=f"{_REQUEST_PREFIX}{self._started + 1}",
            prompt=tuple(group.trunk_tokens[: blocks * self._view.block_size]),
            sampling=Sampling(temperature=0.0),
            stopping=Stopping(max_tokens=1),
            salt=_SALT,
            priority=_LAST,
            arrival=now,
            prefill_only=True,
            scratch=True,
        )
        if self._view.capacity.shortage(request, 1) is None:
            self._started += 1
            self._hit = hit
            self._proof.remember(hit)
            self._requests.add_scratch(request)

    @property
    def _live(self) -> bool:
        return f"{_REQUEST_PREFIX}{self._started}" in self._queue.by_request

    def compare(self, group: Group) -> Sequence[WrongBlock]:
        """Return the blocks of the hit that differ from those that a group has computed."""
        assert self._hit is not None, "it began with a hit"
        blocks = len(self._hit.tables[0])
        trunk = group.trunk
        tables = tuple([table[:blocks] for table in (trunk.table, *trunk.window_tables)])
        return self._proof.differences(self._hit, tables)
