"""Admits waiting groups: which of them request blocks, and how results are handled."""

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from blocks import Allocate, FreeReason, Step, StepItem
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.releases import Releases
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group


class Admitted(NamedTuple):
    """A group that received blocks. `cached_tokens` hit the prefix cache; None if the group was swapped in."""

    group: Group
    cached_tokens: int | None


class _Refused(NamedTuple):
    """The first refused group, and the available blocks at that time: with as few it would be refused again."""

    group: Group
    available_blocks: int


class Admissions:
    """Requests blocks for waiting groups, smallest first.

    `deferred` counts the groups that waited for the prefix of another group, not for room, at the latest Step.
    """

    def __init__(self, queue: RequestQueue, view: PoolView, releases: Releases) -> None:
        self.deferred = 0
        self._queue = queue
        self._view = view
        self._releases = releases
        self._refused: _Refused | None = None  # the latest, unless there is a reason to ask again

    # Results.

    def on_result(
        self, asked: Step, refused: Collection[tuple[StepItem, int]], cached: Mapping[int, int]
    ) -> list[Admitted]:
        """Return the admitted groups; refused groups wait again."""
        if asked.commits or (self._refused is not None and self._view.available != self._refused.available_blocks):
            self._refused = None
        admitted = []
        for item, position, number, tokens in _group_items(asked, cached):
            group = self._queue.finish_admission(number)
            if (item, position) in refused:
                self._requeue(group)
            else:
                admitted.append(Admitted(group, tokens))
        return admitted

    def rollback(self) -> None:
        """Return all groups of the Step in flight to the waiting list."""
        for number in list(self._queue.admitting):
            self._requeue(self._queue.finish_admission(number))
        self._refused = None

    def _requeue(self, group: Group) -> None:
        self._view.claims.release_all(group)
        if group.ended:
            self._releases.release(group.members, FreeReason.CANCELLED)
            return
        self._queue.add_waiting(group)
        before = self._refused
        if before is None or before.group.ended or group.key < before.group.key:
            self._refused = _Refused(group, self._view.available)

    # Steps.

    def write(self, step: StepBuilder, now: float, *, preempted: bool) -> None:
        """Request blocks as far as the token budget and the pool allow, unless groups are preempted."""
        queue, view, limits = self._queue, self._view, self._queue.limits
        self.deferred = 0
        if not queue.waiting or preempted:
            return
        if self._would_be_refused(queue.waiting[0]):
            return
        budget = limits.token_budget
        places = limits.max_sequences - queue.running_sequences
        places -= sum(group.width for group in queue.admitting.values())
        spare = self._spare_blocks()
        watermark = limits.watermark(view.capacity.device_blocks)
        for group in list(queue.waiting):
            if budget <= 0 or group.width > places or self._would_be_refused(group):
                break
            # Running groups can grow into the watermark before they preempt. An empty pool needs no watermark.
            reserve = watermark if queue.running or queue.admitting else 0
            if group.isolated and queue.holds_isolated:
                continue  # only one isolated group at a time
            if _is_swapped(group):
                if len(group.blocks) + spare + reserve > view.available:
                    break
                self._request_swap_in(step, group)
                places -= group.width
                spare += group.width
                continue
            if view.claims.conflicts(group):
                self.deferred += 1
                continue
            spare += self._blocks_beyond(group)
            self._request_allocation(step, group, spare + reserve, now)
            places -= group.width
            budget -= group.common
            needed = view.blocks_for(group.common)
            if needed + spare + reserve > view.available:
                # Only a prefix cache hit can make it fit. Later groups wait, so that they cannot starve it.
                break
            granted = view.blocks_for(min(group.common, limits.token_budget))
            view.reserve(granted)
            spare += group.width + needed - granted

    def _would_be_refused(self, group: Group) -> bool:
        """Return whether a group was refused, and no more blocks are available now. Later groups wait behind it."""
        refused = self._refused
        return refused is not None and refused.group is group and self._view.available <= refused.available_blocks

    def _spare_blocks(self) -> int:
        """Return the blocks that running groups need soon: the rest of their prompts, and one for each sequence."""
        cost = self._view.cost
        return sum(
            len(group.live) + cost([(group.trunk, group.common)]) + self._blocks_beyond(group)
            if _is_unforked(group)
            else sum(1 + cost([(member, len(member.tokens))]) for member in group.live)
            for group in self._queue.running
        )

    def _blocks_beyond(self, group: Group) -> int:
        """Return the blocks that the samples or beams of a group need separately once they are forked."""
        if not _is_unforked(group):
            return 0
        blocks_for, whole = self._view.blocks_for, group.common // self._view.block_size
        lengths = [len(member.tokens) for member in group.live]
        lengths += lengths[:1] * (group.width - len(lengths))
        most = sum(blocks_for(length) - whole for length in lengths)
        return most - (blocks_for(group.common) - whole)

    def _request_swap_in(self, step: StepBuilder, group: Group) -> None:
        self._queue.start_admission(group)
        self._view.reserve(len(group.blocks))
        step.swap_ins.append(group.id)

    def _request_allocation(self, step: StepBuilder, group: Group, spare: int, now: float) -> None:
        request = group.request
        self._queue.start_admission(group)
        self._view.claims.claim(group)
        step.allocates.append(
            Allocate(
                group=group.id,
                sequence=group.trunk.id,
                request_id=request.request_id,
                salt=group.salt,
                token_ids=group.trunk_tokens,
                compute_tokens=self._queue.limits.token_budget,
                spare_blocks=spare,
                waited_seconds=max(0.0, now - request.arrival),
            )
        )


def _is_swapped(group: Group) -> bool:
    return any(member.swapped for member in group.members)


def _is_unforked(group: Group) -> bool:
    """Return whether only the trunk runs: samples are not forked, beams have not branched."""
    return not group.forked or (group.beams is not None and not group.trunk.generated)


def _group_items(step: Step, cached: Mapping[int, int]) -> Iterator[tuple[StepItem, int, int, int | None]]:
    """List the requests of a Step for groups: item, position, group, and tokens that hit the prefix cache."""
    for position, number in enumerate(step.swap_ins):
        yield StepItem.SWAP_IN, position, number, None
    for position, item in enumerate(step.allocates):
        yield StepItem.ALLOCATE, position, item.group, cached.get(item.sequence)
