"""swap_out and swap_in: a group moves to the other tier, all of it or nothing.

Tables of the group that share a block go on sharing it there. A keyed block whose key the other tier has already is
shared with what is there, not copied again; a copy carries the key along. A block that no key leads to (keyed before a
reset, or blamed by an audit) is shared with nothing, and no key leads to its copy.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from blocks import Copy, StepItem, TableChange
from kvmanager.applied import Outcome
from kvmanager.errors import InvalidItem, OutOfBlocks
from kvmanager.parts import Parts, parts_of
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.tier.tier import Seal, Tier


@dataclass
class _Route:
    """Where the blocks of a group go.

    `there` are those that the target tier has, `to_copy` those that need a block of it, and `twins` those with the same
    key as one of these.
    """

    there: dict[int, int] = field(default_factory=dict)
    to_copy: dict[int, int] = field(default_factory=dict)
    twins: dict[int, int] = field(default_factory=dict)

    def target(self, block: int) -> int:
        """Return the block of the target tier."""
        return self.there.get(block) or self.to_copy[self.twins.get(block, block)]


def swap_out(state: PoolState, group: int, outcome: Outcome) -> Parts:
    """Move a group to the host tier. A full host tier refuses: the group is then computed again instead."""
    members = _members(state, group, swapped=False)
    route = _Route()
    yield from _planning(route, members, state.device, state.host)
    yield from _moving(route, members, state, state.host.grant_many)
    state.host.take_evictions()  # nobody hears of them: what the host tier has cached is a second chance, no promise
    for part in parts_of(route.to_copy.items()):
        outcome.device_to_host += _copies(part)
        outcome.host_sealed += _carry_keys(part, state.device, state.host)
        yield len(part)
    yield from state.releasing([])  # the old tables; last: a block may lose its key with its last holder
    _tell(StepItem.SWAP_OUT, members, outcome)


def swap_in(state: PoolState, group: int, outcome: Outcome) -> Parts:
    """Move a group back to the device."""
    members = _members(state, group, swapped=True)
    route = _Route()
    yield from _planning(route, members, state.host, state.device)
    seen = len(outcome.evicted)
    tables = yield from _moving(route, members, state, lambda number: state.grant(number, outcome))
    state.host_under_way.clear()
    for table in tables:
        state.release_host_after_step(reversed(table))
    for part in parts_of(route.to_copy.items()):
        outcome.host_to_device += _copies(part)
        for block, key in _carry_keys(part, state.host, state.device):
            outcome.sealed_blocks.append(block)
            outcome.sealed_keys.append(key)
        yield len(part)
    _tell(StepItem.SWAP_IN, members, outcome, seen)


def _members(state: PoolState, group: int, *, swapped: bool) -> list[SequenceTable]:
    members = state.members(group)
    if members[0].swapped != swapped:
        raise InvalidItem(f"group {group} is {'not ' if swapped else ''}swapped out")
    return members


def _planning(route: _Route, members: list[SequenceTable], source: Tier, target: Tier) -> Parts:
    """Plan the move. Raises OutOfBlocks when the target tier has no room for it."""
    first_of_key: dict[bytes, int] = {}
    seen = bytearray(source.total + 1)
    idle: set[int] = set()
    for part in parts_of(block for member in members for block in member.table):
        for block in part:
            if seen[block]:
                continue
            seen[block] = 1
            key = source.key(block) if source.marks.is_indexable(block) else None
            there = None if key is None else target.keys.find(key)
            if there is not None:
                route.there[block] = there
                if not target.count(there):
                    idle.add(there)
            elif key is not None and first_of_key.setdefault(key, block) != block:
                route.twins[block] = first_of_key[key]
            else:
                route.to_copy[block] = 0
        yield len(part)
    needed, available = len(route.to_copy), target.available - len(idle)
    if needed > available:
        raise OutOfBlocks(f"{needed} blocks are needed in the other tier, {available} are free")


def _moving(
    route: _Route, members: list[SequenceTable], state: PoolState, grant: Callable[[int], list[int]]
) -> Generator[int, None, list[list[int]]]:
    """Give the members their tables in the target tier, and return the old ones, which are still held: `under_way`."""
    swapped = members[0].swapped
    target = state.device if swapped else state.host
    here, there = state.host_under_way, state.under_way
    if not swapped:
        here, there = there, here
    tables = [member.table for member in members]
    for part in parts_of(block for table in tables for block in table):
        found = [route.there[block] for block in part if block in route.there]
        target.hold(found)  # before anything is granted, or a grant could evict them
        there += found
        yield len(part)
    for part in parts_of(list(route.to_copy)):
        blocks = grant(len(part))
        route.to_copy.update(zip(part, blocks, strict=True))
        there += blocks
        yield len(part)
    new_tables = yield from _new_tables(route, tables, target, there)
    there.clear()
    for member, new_table in zip(members, new_tables, strict=True):
        member.table = new_table
        member.swapped = not swapped
    for table in reversed(tables):  # what comes first is given back first, and `releasing` begins at the end
        here += table
    return tables


def _new_tables(
    route: _Route, tables: list[list[int]], target: Tier, held: list[int]
) -> Generator[int, None, list[list[int]]]:
    """Translate tables, and hold what they have for each entry; `held` has the granted blocks once."""
    counted = bytearray(target.total + 1)  # the grant has counted one holder
    new_tables = []
    for table in tables:
        new_table: list[int] = []
        for part in parts_of(table):
            for block in part:
                moved = route.target(block)
                if block not in route.there:
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


def _tell(item: StepItem, members: list[SequenceTable], outcome: Outcome, seen: int | None = None) -> None:
    evicted = [] if seen is None else outcome.evicted[seen:]
    for member in members:
        outcome.tables.append(TableChange(member.id, 0, member.table[:], member.room))
        outcome.effects.append((item, member.id, member.group, member.table[:], evicted, None))
        evicted = []
