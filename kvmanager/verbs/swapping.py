"""swap_out and swap_in: a group moves to the other tier, all of it or nothing.

Tables of the group that share a block go on sharing it there. A keyed block whose key the other tier has already is
shared with what is there, not copied again; a copy carries the key along. A block that no key leads to (keyed before a
reset, or blamed by an audit) is shared with nothing, and no key leads to its copy.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvmanager.books import Books, Sequence
from kvmanager.errors import InvalidItem, OutOfBlocks
from kvmanager.step import Copy, StepItem, StepResult, TableChange
from kvmanager.tier import Seal, Tier


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


def swap_out(books: Books, group: int, result: StepResult) -> None:
    """Move a group to the host tier. A full host tier refuses: the group is then computed again instead."""
    members = _members(books, group, swapped=False)
    route = _route(members, books.device, books.host)
    tables = _move(members, route, books.host, books.host.grant_many)
    books.host.take_evictions()  # nobody hears of them: what the host tier has cached is a second chance, no promise
    result.device_to_host += _copies(route)
    result.host_sealed += _carry_keys(route, books.device, books.host)
    for table in tables:  # last: a block may lose its key with its last holder
        books.device.release_many(reversed(table))
    _tell(StepItem.SWAP_OUT, members, result)


def swap_in(books: Books, group: int, result: StepResult) -> None:
    """Move a group back to the device."""
    members = _members(books, group, swapped=True)
    route = _route(members, books.host, books.device)
    seen = len(result.evicted)
    tables = _move(members, route, books.device, lambda number: books.grant(number, result))
    for table in tables:
        books.release_host_after_step(reversed(table))
    result.host_to_device += _copies(route)
    for block, key in _carry_keys(route, books.host, books.device):
        result.sealed_blocks.append(block)
        result.sealed_keys.append(key)
    _tell(StepItem.SWAP_IN, members, result, seen)


def _members(books: Books, group: int, *, swapped: bool) -> list[Sequence]:
    members = books.members(group)
    if members[0].swapped != swapped:
        raise InvalidItem(f"group {group} is {'not ' if swapped else ''}swapped out")
    return members


def _route(members: list[Sequence], source: Tier, target: Tier) -> _Route:
    """Plan the move. Raises OutOfBlocks when the target tier has no room for it."""
    route = _Route()
    first_of_key: dict[bytes, int] = {}
    for block in dict.fromkeys(block for member in members for block in member.table):
        key = source.key(block) if source.is_findable(block) else None
        there = None if key is None else target.find(key)
        if there is not None:
            route.there[block] = there
        elif key is not None and first_of_key.setdefault(key, block) != block:
            route.twins[block] = first_of_key[key]
        else:
            route.to_copy[block] = 0
    idle = sum(target.count(block) == 0 for block in set(route.there.values()))
    needed, available = len(route.to_copy), target.available - idle
    if needed > available:
        raise OutOfBlocks(f"{needed} blocks are needed in the other tier, {available} are free")
    return route


def _move(members: list[Sequence], route: _Route, target: Tier, grant: Callable[[int], list[int]]) -> list[list[int]]:
    """Give the members their tables in the target tier, and return the old ones, which are still held."""
    tables = [member.table for member in members]
    for table in tables:  # before anything is granted, or a grant could evict them
        for block in table:
            if block in route.there:
                target.hold(route.there[block])
    route.to_copy.update(zip(route.to_copy, grant(len(route.to_copy)), strict=True))
    counted = set(route.to_copy.values())  # the grant has counted one holder
    for member in members:
        new_table = []
        for block in member.table:
            moved = route.target(block)
            if moved in counted:
                counted.remove(moved)
            elif block not in route.there:
                target.hold(moved)
            new_table.append(moved)
        member.table = new_table
        member.swapped = not member.swapped
    return tables


def _copies(route: _Route) -> list[Copy]:
    return [Copy(source, target) for source, target in route.to_copy.items()]


def _carry_keys(route: _Route, source: Tier, target: Tier) -> list[Seal]:
    seals = []
    for block, moved in route.to_copy.items():
        key = source.key(block)
        if not source.is_findable(block):
            target.make_unfindable(moved)
        if key is not None:
            target.seal(moved, key)
            seals.append(Seal(moved, key))
    return seals


def _tell(item: StepItem, members: list[Sequence], result: StepResult, seen: int | None = None) -> None:
    evicted = [] if seen is None else result.evicted[seen:]
    for member in members:
        result.tables.append(TableChange(member.id, 0, member.table[:], member.room))
        result.deeds.append((item, member.id, member.group, member.table[:], evicted, None))
        evicted = []
