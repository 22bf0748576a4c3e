"""swap_out and swap_in: move a whole group to the other tier.

Blocks that tables of the group share stay shared. A keyed block whose key the target tier has already is replaced by
that block instead of being copied; copies keep their keys. An unindexed block (keyed before a reset, or marked by an
audit) is always copied, and its copy is not indexed either.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from blocks import Copy, StepItem, TableChange
from kvmanager.applied import Outcome
from kvmanager.errors import InvalidItem, OutOfBlocks, shortage
from kvmanager.parts import Parts, parts_of
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.tier.tier import Seal, Tier


@dataclass
class Route:
    """The mapping of a group's blocks to blocks of the target tier.

    `cached` maps blocks to target blocks with the same key, `to_copy` the blocks to copy to granted ones. `duplicates`
    maps blocks to the block in `to_copy` with the same key.
    """

    cached: dict[int, int] = field(default_factory=dict)
    to_copy: dict[int, int] = field(default_factory=dict)
    duplicates: dict[int, int] = field(default_factory=dict)

    def target(self, block: int) -> int:
        """Return the block of the target tier that takes the place of a block."""
        return self.cached.get(block) or self.to_copy[self.duplicates.get(block, block)]


def swap_out(state: PoolState, group: int, outcome: Outcome) -> Parts:
    """Move a group to the host tier. Raises OutOfBlocks if it is full; the engine then recomputes the group instead."""
    yield from swapping_out(state, group, (yield from planning_swap(state, group, swapped=False)), outcome)


def swap_in(state: PoolState, group: int, outcome: Outcome) -> Parts:
    """Move a group back to the device."""
    yield from swapping_in(state, group, (yield from planning_swap(state, group, swapped=True)), outcome)


def planning_swap(state: PoolState, group: int, *, swapped: bool) -> Generator[int, None, Route]:
    """Return the route of a group, which is `swapped` or not, to the other tier, changing nothing.

    Raises UnknownSequence, InvalidItem and OutOfBlocks.
    """
    members = state.members(group)
    if members[0].swapped != swapped:
        raise InvalidItem(f"group {group} is {'not ' if swapped else ''}swapped out")
    route = Route()
    source, target = (state.host, state.device) if swapped else (state.device, state.host)
    yield from _planning(route, members, state, source, target)
    return route


def swapping_out(state: PoolState, group: int, route: Route, outcome: Outcome) -> Parts:
    """Move a group to the host tier by a planned route."""
    members = state.members(group)
    yield from _moving(route, members, state, state.host.grant_many)
    state.host.take_evictions()  # not reported, because nothing depends on the cached blocks of the host tier
    for part in parts_of(route.to_copy.items()):
        outcome.device_to_host += _copies(part)
        outcome.host_sealed += _carry_keys(part, state.device, state.host)
        yield len(part)
    yield from state.releasing([])  # the old tables; last, because a block may lose its key on release
    yield from _recording_move(StepItem.SWAP_OUT, members, outcome)


def swapping_in(state: PoolState, group: int, route: Route, outcome: Outcome) -> Parts:
    """Move a group back to the device by a planned route."""
    members = state.members(group)
    evicted_before = len(outcome.evicted)
    tables = yield from _moving(route, members, state, lambda count: state.grant(count, outcome))
    for some in parts_of(tables):
        for table in some:
            state.release_host_after_step(reversed(table))
        # The first tables are at its end. Those of a window kind may be empty.
        del state.host_in_flight[len(state.host_in_flight) - sum(map(len, some)) :]
        yield len(some)
    for part in parts_of(route.to_copy.items()):
        outcome.host_to_device += _copies(part)
        for block, key in _carry_keys(part, state.host, state.device):
            outcome.sealed_blocks.append(block)
            outcome.sealed_keys.append(key)
        yield len(part)
    yield from _recording_move(StepItem.SWAP_IN, members, outcome, evicted_before)


def _planning(route: Route, members: list[SequenceTable], state: PoolState, source: Tier, target: Tier) -> Parts:
    """Fill `route`, changing no tier. Raises OutOfBlocks if the target tier has too few blocks, or too many shares."""
    first_of_key: dict[bytes, int] = {}
    seen = bytearray(source.total + 1)
    idle: set[int] = set()
    for part in parts_of(block for member in members for block in member.table):
        for block in part:
            if seen[block]:
                continue
            seen[block] = 1
            key = source.key(block) if source.marks.is_indexable(block) else None
            cached = None if key is None else target.keys.find(key)
            if cached is not None:
                route.cached[block] = cached
                if not target.ref_count(cached):
                    idle.add(cached)
            elif key is not None and first_of_key.setdefault(key, block) != block:
                route.duplicates[block] = first_of_key[key]
            else:
                route.to_copy[block] = 0
        yield len(part)
    state.check_shares(len(route.cached) + len(route.duplicates))
    needed, available = len(route.to_copy), target.available - len(idle)
    if needed > available:
        raise OutOfBlocks(f"{shortage(needed, available, kind=state.kind_name)} in the other tier")


def _moving(
    route: Route, members: list[SequenceTable], state: PoolState, grant: Callable[[int], list[int]]
) -> Generator[int, None, list[list[int]]]:
    """Give the members tables in the target tier. Return their old tables, whose blocks are in flight."""
    swapped = members[0].swapped
    target = state.device if swapped else state.host
    source_in_flight, target_in_flight = state.host_in_flight, state.in_flight
    if not swapped:
        source_in_flight, target_in_flight = target_in_flight, source_in_flight
    tables = [member.table for member in members]
    for part in parts_of(block for table in tables for block in table):
        found = [route.cached[block] for block in part if block in route.cached]
        target.hold(found)  # before any grant, so that no grant evicts them
        target_in_flight += found
        yield len(part)
    for part in parts_of(list(route.to_copy)):
        blocks = grant(len(part))
        route.to_copy.update(zip(part, blocks, strict=True))
        target_in_flight += blocks
        yield len(part)
    new_tables = yield from _new_tables(route, tables, target, target_in_flight)
    target_in_flight.clear()
    for member, new_table in zip(members, new_tables, strict=True):
        member.table = new_table
        member.swapped = not swapped
    for table in reversed(tables):  # `releasing` begins at the end, and the first table is released first
        source_in_flight += table
    return tables


def _new_tables(
    route: Route, tables: list[list[int]], target: Tier, held: list[int]
) -> Generator[int, None, list[list[int]]]:
    """Translate tables, and hold the new blocks for each entry. Granted blocks are in `held` once already."""
    counted = bytearray(target.total + 1)  # granted blocks whose first holder is assigned
    new_tables = []
    for table in tables:
        new_table: list[int] = []
        for part in parts_of(table):
            for block in part:
                moved = route.target(block)
                if block not in route.cached:
                    if counted[moved]:
                        target.hold((moved,))
                        held.append(moved)
                    counted[moved] = 1
                new_table.append(moved)
            yield len(part)
        new_tables.append(new_table)
    return new_tables


def _copies(moves: list[tuple[int, int]]) -> list[Copy]:
    return [Copy(source, target) for source, target in moves]


def _carry_keys(moves: list[tuple[int, int]], source: Tier, target: Tier) -> list[Seal]:
    seals = []
    for block, moved in moves:
        key = source.key(block)
        if not source.marks.is_indexable(block):
            target.marks.unindex(moved)
        if key is not None:
            target.keys.seal(moved, key)
            seals.append(Seal(moved, key))
    return seals


def _recording_move(
    item: StepItem, members: list[SequenceTable], outcome: Outcome, evicted_before: int | None = None
) -> Parts:
    evicted = [] if evicted_before is None else outcome.evicted[evicted_before:]
    for part in parts_of(members):
        for member in part:
            outcome.tables.append(TableChange(member.id, member.dropped, member.table[:], member.room_tokens))
            outcome.effects.append((item, member.id, member.group, member.table[:], evicted, None))
            evicted = []
        yield len(part)
