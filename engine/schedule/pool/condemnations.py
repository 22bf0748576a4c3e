"""Withdraws blocks whose contents were found wrong, and computes again what would be read from them.

The next block step condemns the blocks, first of all its items, and frees the groups that hold one. They wait like
preempted groups. So no request fails for a wrong block, and a wrong block is never granted again.

Blocks that were computed from a wrong one have right checksums of wrong contents, and nothing records which they are.
So a block that may have been read while it was wrong clears the whole prefix cache.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from blocks import Condemn, CondemnReason, FreeReason
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.releases import Releases
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group
from engine.schedule.step_plan import Copies


class WrongBlock(NamedTuple):
    """A block whose contents are wrong, in a tier of a kind, and the sequence that found it, 0 if none did."""

    kind: int
    host: bool
    block: int
    reason: CondemnReason
    sequence: int = 0


# A copy is compared before anything reads its destination.
_UNREAD = frozenset({CondemnReason.SWAP_IN, CondemnReason.HOST_HIT, CondemnReason.COPY})


def may_have_been_read(wrong: WrongBlock) -> bool:
    """Return whether other blocks may have been computed from a wrong block."""
    return wrong.reason not in _UNREAD


class AdmittedBlocks(NamedTuple):
    """Blocks that a sequence was admitted with and reads next: tables of each kind, 0 without a block.

    They are the blocks that it hit, or all of a sequence that was swapped in.
    """

    sequence: int
    tables: tuple[tuple[int, ...], ...]
    swapped_in: bool


class Proof(Protocol):
    """Compares blocks with what they must contain."""

    def check(self, answers: Sequence[Copies], arrivals: Sequence[AdmittedBlocks]) -> Sequence[WrongBlock]:
        """Make the copies of results, and return the wrong blocks among what arrived with them."""

    def chooses_recomputation(self) -> bool:
        """Return whether a hit is to be computed again."""

    def remember(self, hit: AdmittedBlocks) -> None:
        """Remember the contents of a hit's blocks, in place of an earlier hit's."""

    def differences(self, hit: AdmittedBlocks, tables: Sequence[tuple[int, ...]]) -> Sequence[WrongBlock]:
        """Return blocks of the remembered hit that have not changed since, and differ from recomputed ones."""


# Of one block step. What is left is condemned by the next one.
_MOST_BLOCKS = 8192


class Condemnations:
    """The blocks that the next block step condemns."""

    def __init__(self, queue: RequestQueue, view: PoolView, releases: Releases) -> None:
        self._queue = queue
        self._view = view
        self._releases = releases
        self._pending: list[WrongBlock] = []
        self._device: list[set[int]] = [set() for _ in self._kinds]

    @property
    def any_pending(self) -> bool:
        """Whether the next block step condemns blocks."""
        return bool(self._pending)

    def condemn(self, wrong: Sequence[WrongBlock], now: float) -> list[set[int]]:
        """Condemn blocks with the next block step, and let the groups that hold one wait until they can be recomputed.

        Returns the device blocks of each kind that were not condemned before. No block step may be in flight.
        """
        self._pending += wrong
        blocks = [{one.block for one in wrong if one.kind == kind and not one.host} for kind in self._kinds]
        new = [own - before for own, before in zip(blocks, self._device, strict=True)]
        for own, before in zip(new, self._device, strict=True):
            before |= own
        for group in [group for group in self._queue.running if _holds(group, blocks)]:
            self._restart(group, now)
        return new

    def write(self, step: StepBuilder) -> None:
        """Add the pending condemnations to a block step."""
        pending, self._pending = self._pending[:_MOST_BLOCKS], self._pending[_MOST_BLOCKS:]
        items: dict[tuple[int, CondemnReason, bool, int], list[int]] = {}
        for one in pending:
            items.setdefault((one.sequence, one.reason, one.host, one.kind), []).append(one.block)
        step.condemns += [
            Condemn(sequence, blocks, reason, host, kind) for (sequence, reason, host, kind), blocks in items.items()
        ]
        counts = [sum(one.kind == kind and not one.host for one in pending) for kind in self._kinds]
        left = [self._view.available, *[window.available for window in self._view.windows]]
        blocks, *in_windows = map(min, counts, left)
        self._view.reserve(blocks, in_windows)

    @property
    def _kinds(self) -> range:
        return range(1 + len(self._view.windows))

    def _restart(self, group: Group, now: float) -> None:
        """Return a running group to the queue. The next block step frees its blocks; none is committed any more."""
        self._releases.release(group.members, FreeReason.PREEMPTED)
        for member in group.members:
            member.lose_blocks()
        group.restart_from_trunk()
        self._view.claims.release_all(group)
        group.stats.preempt(now, 0)
        self._queue.totals.count_preemption(0)
        self._queue.preempt(group)


def admitted_blocks(group: Group, cached_tokens: int | None, block_size: int) -> list[AdmittedBlocks]:
    """Return what an admitted group reads: its first `cached_tokens` tokens, or all if it was swapped in (None)."""
    if cached_tokens == 0:
        return []
    if cached_tokens is None:
        return [
            AdmittedBlocks(member.id, (member.table, *member.window_tables), True)
            for member in group.members
            if member.table
        ]
    trunk, blocks = group.trunk, cached_tokens // block_size
    return [AdmittedBlocks(trunk.id, tuple([table[:blocks] for table in (trunk.table, *trunk.window_tables)]), False)]


def _holds(group: Group, blocks: Sequence[set[int]]) -> bool:
    """Return whether a member of a group has a block of these of each kind."""
    return any(
        not own.isdisjoint(table)
        for member in group.members
        for own, table in zip(blocks, (member.table, *member.window_tables), strict=False)
    )
