"""Admits waiting groups: which of them request blocks, and how results are handled."""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from blocks import Allocate, FreeReason, Step, StepItem
from engine.schedule.limits import Limits
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.preemption import Victims
from engine.schedule.pool.releases import Releases
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group


class Admitted(NamedTuple):
    """A group that received blocks. `cached_tokens` hit the prefix cache; None if the group was swapped in."""

    group: Group
    cached_tokens: int | None


class _Refused(NamedTuple):
    """The first refused group, and the available blocks of each kind then: with as few it would be refused again."""

    group: Group
    available_blocks: tuple[int, ...]


class Admissions:
    """Requests blocks for waiting groups, smallest first.

    `deferred` counts the groups that waited for the prefix of another group, not for room, at the latest block step.
    """

    def __init__(self, queue: RequestQueue, view: PoolView, releases: Releases, victims: Victims) -> None:
        self.deferred = 0
        self._queue = queue
        self._view = view
        self._releases = releases
        self._victims = victims
        self._refused: _Refused | None = None  # the latest, unless there is a reason to ask again

    # Results.

    def on_result(
        self, asked: Step, refused: Collection[tuple[StepItem, int]], cached: Mapping[int, int]
    ) -> list[Admitted]:
        """Return the admitted groups; refused groups wait again."""
        if asked.commits or (self._refused is not None and _availability(self._view) != self._refused.available_blocks):
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
        """Return all groups of the block step in flight to the waiting list."""
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
            self._refused = _Refused(group, _availability(self._view))

    # Block steps.

    def write(self, step: StepBuilder, now: float, *, preempted: bool) -> None:
        """Request blocks as far as the admission budget and the pool allow, unless groups are preempted.

        Short prompts have a budget of their own, so that they need not wait until long ones before them are admitted
        one after the other. They take only blocks that those leave.
        """
        queue, view = self._queue, self._view
        self.deferred = 0
        view.claims.clear_expected()
        if not queue.waiting or preempted or self._would_be_refused(queue.waiting[0]):
            return
        room = self._room()
        for group in list(queue.waiting):
            if group.width > room.places or self._would_be_refused(group):
                return
            if group.isolated and queue.holds_isolated:
                continue  # only one isolated group at a time
            if _is_swapped(group):
                if not self._swap_in(step, group, room):
                    return
            elif (owner := view.claims.awaited_owner(group)) is not None:
                self._defer(group, owner)
            elif not self._allocate(step, group, room, now):
                return

    def _swap_in(self, step: StepBuilder, group: Group, room: "_Room") -> bool:
        """Request that a group is swapped in; return whether later ones may be admitted, too."""
        blocks, reserve = len(group.blocks), self._reserve(room, group)
        in_windows = [len(window.live(group.members)) for window in self._view.windows]
        if not room.has(blocks + reserve, self._reserved(in_windows, reserve)):
            return False
        self._queue.start_admission(group)
        self._view.claims.claim_rest(group)
        step.swap_ins.append(group.id)
        room.take(group.width, blocks, in_windows)
        return True

    def _allocate(self, step: StepBuilder, group: Group, room: "_Room", now: float) -> bool:
        """Request a group's first blocks, unless its budget is spent; return whether later ones may be admitted."""
        view, reserve = self._view, self._reserve(room, group)
        cached = view.claims.cached_blocks(group)
        tokens = group.common - len(cached) * view.block_size
        short = tokens <= self._queue.limits.long_prefill_token_threshold
        asks = room.admits(short=short)
        if not asks and (short or not self._queue.limits.long_prefill_token_threshold):
            return False
        room.spare += self._blocks_beyond(group)
        room.add_window_spares(self._window_blocks_beyond(group))
        if asks:
            self._request_allocation(step, group, room.spare + reserve, self._reserved(room.spares, reserve), now)
            room.spend(tokens, short=short)
        needed, granted = room.needs(group.common, cached)
        in_windows = room.window_needs(group.common)
        if not room.has(needed + reserve, self._reserved(in_windows, reserve)):
            # Only a prefix cache hit can make it fit. Later groups wait, so that they cannot starve it.
            return False
        room.take(group.width, granted if asks else 0, in_windows if asks else ())
        if not asks:
            room.add_window_spares(in_windows)
        room.spare += needed - granted if asks else needed
        return True

    def next_admitted(self) -> Group | None:
        """Return the first waiting group if the next block step is expected to admit it."""
        queue, view = self._queue, self._view
        if not queue.waiting:
            return None
        group, room = queue.waiting[0], self._room()
        if self._would_be_refused(group) or view.claims.awaited_owner(group) is not None:
            return None
        if _is_swapped(group):
            needed = len(group.blocks)
            in_windows = [len(window.live(group.members)) for window in view.windows]
        else:
            needed = room.needs(group.common, view.claims.cached_blocks(group))[0] + self._blocks_beyond(group)
            beyond = self._window_blocks_beyond(group)
            in_windows = [sum(pair) for pair in zip(room.window_needs(group.common), beyond, strict=True)]
        reserve = self._reserve(room, group)
        fits = group.width <= room.places and room.has(needed + reserve, self._reserved(in_windows, reserve))
        return group if fits and not (group.isolated and queue.holds_isolated) else None

    def _room(self) -> "_Room":
        """Return the places and blocks that are left."""
        queue = self._queue
        admitting = sum(group.width for group in queue.admitting.values())
        places = queue.limits.max_sequences - queue.running_sequences - admitting
        return _Room(self._view, queue.limits, places, self._spare_blocks(), self._window_spares())

    def _reserve(self, room: "_Room", group: Group) -> int:
        """Return the blocks that stay free, so that running groups grow before they preempt. An empty pool needs none.

        If a preemption would lose computed tokens, or if the group will share blocks, one block for each sequence as
        well: with fewer, more is recomputed or swapped than the larger batch gains
        (docs/decisions/003-admission-and-preemption.md has the figures).
        """
        queue, limits = self._queue, self._queue.limits
        if not (queue.running or queue.admitting):
            return 0
        shares = any(map(self._view.is_held, self._view.claims.cached_blocks(group)))
        loses = limits.growth_reserve and not (self._victims.next_is_swapped() and not shares)
        growth = limits.max_sequences - room.places if loses else 0
        return limits.watermark(self._view.capacity.device_blocks) + growth

    def _reserved(self, in_windows: Items[int], reserve: int) -> list[int]:
        """Add the watermark of each window kind, whose blocks do not grow with their sequences, if there is one."""
        kinds = [window.kind for window in self._view.windows]
        marks = [min(reserve, self._queue.limits.watermark(kind.device_blocks)) for kind in kinds]
        return [count + mark for count, mark in zip(in_windows, marks, strict=True)]

    def _defer(self, group: Group, owner: Group) -> None:
        self.deferred += 1
        self._view.claims.expect(owner, group)
        group.stats.defer(owner.request.request_id)

    def _would_be_refused(self, group: Group) -> bool:
        """Return whether a group was refused, and no more blocks are available now. Later groups wait behind it."""
        refused = self._refused
        if refused is None or refused.group is not group:
            return False
        return all(now <= then for now, then in zip(_availability(self._view), refused.available_blocks, strict=True))

    def _spare_blocks(self) -> int:
        """Return the blocks that running groups need for the rest of their known tokens."""
        cost = self._view.cost
        return sum(
            cost([(group.trunk, group.common)]) + self._blocks_beyond(group)
            if _is_unforked(group)
            else sum(cost([(member, len(member.tokens))]) for member in group.live)
            for group in self._queue.running
        )

    def _window_spares(self) -> list[int]:
        """Return the blocks of each window kind that running groups need for the rest of their known tokens."""
        windows, running = self._view.windows, self._queue.running
        if not windows:
            return []
        members = [
            member
            for group in running
            for member in (
                [(group.trunk, group.common)] if _is_unforked(group) else [(one, len(one.tokens)) for one in group.live]
            )
        ]
        spares = [window.rest(members, self._queue.limits.prefill_room) for window in windows]
        beyond = [self._window_blocks_beyond(group) for group in running]
        return [rest + sum(counts) for rest, *counts in zip(spares, *beyond, strict=True)]

    def _window_blocks_beyond(self, group: Group) -> list[int]:
        """Return what `_blocks_beyond` does for each window kind, up to what the group can hold."""
        more, capacity = self._blocks_beyond(group), self._view.capacity
        firsts = _window_needs(self._view, self._queue.limits, group.common)
        most = [capacity.max_window_blocks(group.request, window.kind) for window in self._view.windows]
        return [max(0, min(first + more, total) - first) for first, total in zip(firsts, most, strict=True)]

    def _blocks_beyond(self, group: Group) -> int:
        """Return the blocks that the samples or beams of a group need separately once they are forked."""
        if not (_is_unforked(group) and group.request.generates):
            return 0
        blocks_for, whole = self._view.blocks_for, group.common // self._view.block_size
        lengths = [len(member.tokens) for member in group.live]
        lengths += lengths[:1] * (group.width - len(lengths))
        most = sum(blocks_for(length) - whole for length in lengths)
        return most - (blocks_for(group.common) - whole)

    def _request_allocation(
        self, step: StepBuilder, group: Group, spare: int, window_spares: Items[int], now: float
    ) -> None:
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
                compute_tokens=self._queue.limits.prefill_room,
                spare_blocks=spare,
                waited_seconds=max(0.0, now - group.stats.waiting_since(request.arrival)),
                prefix_of=group.stats.deferred_behind,
                window_spares=window_spares,
            )
        )


class _Room:
    """Places, blocks and tokens that are left while a block step is built.

    `spare` blocks, and `spares` of each window kind, are promised to groups.
    """

    def __init__(self, view: PoolView, limits: Limits, places: int, spare: int, spares: list[int]) -> None:
        self.places = places
        self.spare = spare
        self.spares = spares
        self._view = view
        self._limits = limits
        self._prefill_room = limits.prefill_room
        self._acquired: set[int] = set()  # cached blocks without a holder that this block step is expected to hit
        self._tokens = self._short_tokens = limits.admitted_tokens

    def admits(self, *, short: bool) -> bool:
        """Return whether a prompt may be admitted: the budget of all, or that of short ones, is not spent."""
        return (self._short_tokens if short else self._tokens) > 0

    def spend(self, tokens: int, *, short: bool) -> None:
        """Count the uncached tokens of an admitted prompt."""
        self._tokens -= tokens
        self._short_tokens -= tokens if short else 0

    def has(self, blocks: int, in_windows: Items[int]) -> bool:
        """Return whether this many blocks, and these of each window kind, are left."""
        promised = [count + spare for count, spare in zip(in_windows, self.spares, strict=True)]
        return self._view.has(blocks + self.spare, promised)

    def take(self, places: int, blocks: int, in_windows: Items[int]) -> None:
        """Count a group's sequences and the blocks that it receives now."""
        self.places -= places
        self._view.reserve(blocks, in_windows)

    def add_window_spares(self, spares: Items[int]) -> None:
        """Promise blocks of each window kind to a group."""
        self.spares = [count + more for count, more in zip(self.spares, spares, strict=True)]

    def window_needs(self, tokens: int) -> list[int]:
        """Return the blocks of each window kind that a first allocation takes at most."""
        return _window_needs(self._view, self._limits, tokens)

    def needs(self, tokens: int, cached: Collection[int]) -> tuple[int, int]:
        """Return the available blocks that a first allocation takes: for all its tokens, and those granted now.

        `cached` are the blocks that it is expected to hit. Those without a holder count once for all groups of a block
        step.
        """
        view = self._view
        idle = {block for block in cached if not view.is_held(block)} - self._acquired
        self._acquired |= idle
        room = min(tokens, len(cached) * view.block_size + self._prefill_room)
        shared = len(cached) - len(idle)
        return view.blocks_for(tokens) - shared, view.blocks_for(room) - shared


def _is_swapped(group: Group) -> bool:
    return any(member.swapped for member in group.members)


def _is_unforked(group: Group) -> bool:
    """Return whether only the trunk runs: samples are not forked, beams have not branched."""
    return not group.forked or (group.beams is not None and not group.trunk.generated)


def _group_items(step: Step, cached: Mapping[int, int]) -> Iterator[tuple[StepItem, int, int, int | None]]:
    """List the requests of a block step for groups: item, position, group, and tokens that hit the prefix cache."""
    for position, number in enumerate(step.swap_ins):
        yield StepItem.SWAP_IN, position, number, None
    for position, item in enumerate(step.allocates):
        yield StepItem.ALLOCATE, position, item.group, cached.get(item.sequence)


def _window_needs(view: PoolView, limits: Limits, tokens: int) -> list[int]:
    computed = min(limits.prefill_room, tokens)
    most = [window.kind.most_blocks(computed, view.block_size) for window in view.windows]
    return [min(view.blocks_for(tokens), blocks) for blocks in most]


def _availability(view: PoolView) -> tuple[int, ...]:
    return (view.available, *[window.available for window in view.windows])
