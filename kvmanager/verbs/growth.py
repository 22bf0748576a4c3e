"""extend: room for more tokens, and copy-on-write."""

from collections.abc import Generator
from typing import NamedTuple

from kvmanager import limits, parts
from kvmanager.errors import InvalidItem
from kvmanager.parts import Rest, parts_of
from kvmanager.pool_spec import LARGEST_ROOM
from kvmanager.pool_state import PoolState, Sequence
from kvmanager.step import Copy, Extend, StepItem, StepResult, TableChange

_EXTEND = StepItem.EXTEND


class _Write(NamedTuple):
    """A block to make writable: a new entry of the table, or the replacement of a shared or keyed one."""

    sequence: Sequence
    entry: int
    replaces: bool


def extend(books: PoolState, item: Extend, result: StepResult) -> Rest | None:
    """Make room in all named sequences of a group, or in none.

    Any block between the old room and the new length that is shared or keyed is replaced by a copy, last block or not;
    the last holder of a block without a key keeps it.
    """
    if len(item.rooms) == 1:
        ((number, tokens),) = item.rooms
        sequence = books.sequences.get(number)
        if sequence is None or sequence.swapped or sequence.group != item.group:
            sequence = _member(books, item.group, number)  # says what is wrong
        if sequence.room == len(sequence.table) * books.block_size:
            return _append(books, sequence, tokens, result)
    rooms = [(_member(books, item.group, number), tokens) for number, tokens in item.rooms]
    if len({number for number, _ in item.rooms}) < len(rooms):
        raise InvalidItem("a sequence is listed twice")
    return _rewriting(books, rooms, result)


def _member(books: PoolState, group: int, number: int) -> Sequence:
    member = books.on_device(number)
    if member.group != group:
        raise InvalidItem(f"sequence {number} is not of group {group}")
    return member


def _append(books: PoolState, sequence: Sequence, tokens: int, result: StepResult) -> Rest | None:
    """Extend one sequence whose blocks are all granted in full: nearly every extend is this one."""
    table = sequence.table
    first = len(table)
    needed = -(-tokens // books.block_size) - first
    if needed <= 0:
        return None
    room = (first + needed) * books.block_size
    if room > LARGEST_ROOM or first + needed > limits.LARGEST_TABLE:
        books.check_available(needed)
        raise InvalidItem(f"room for {room} tokens is more than any sequence can have")
    seen = len(result.evicted)
    if needed == 1:
        blocks = [books.grant_one(result)]
    else:
        books.check_available(needed)
        if needed > parts.LONG:
            return _appending(books, sequence, needed, result)
        blocks = books.grant(needed, result)
    table += blocks
    sequence.room = room
    number = sequence.id
    evicted = result.evicted[seen:] if len(result.evicted) > seen else ()
    result.tables.append(TableChange(number, first, blocks, room))
    result.deeds.append((_EXTEND, number, sequence.group, blocks, evicted, None))
    return None


def _appending(books: PoolState, sequence: Sequence, needed: int, result: StepResult) -> Rest:
    """Extend one sequence by very many blocks."""
    first, seen = len(sequence.table), len(result.evicted)
    yield from books.granting(sequence.table, needed, result)
    blocks = sequence.table[first:]
    sequence.room = len(sequence.table) * books.block_size
    result.tables.append(TableChange(sequence.id, first, blocks, sequence.room))
    result.deeds.append((_EXTEND, sequence.id, sequence.group, blocks, result.evicted[seen:], None))


def _rewriting(books: PoolState, rooms: list[tuple[Sequence, int]], result: StepResult) -> Rest:
    # Counted before they are listed: a length out of all bounds must not cost memory.
    books.check_available(sum(max(0, books.blocks_for(tokens) - len(member.table)) for member, tokens in rooms))
    longest = max((tokens for _, tokens in rooms), default=0)
    if books.blocks_for(longest) > min(limits.LARGEST_TABLE, LARGEST_ROOM // books.block_size):
        raise InvalidItem(f"room for {longest} tokens is more than any sequence can have")
    writes = yield from _planned_writes(books, rooms)
    books.check_available(len(writes))
    old_rooms = [sequence.room for sequence, _ in rooms]
    seen = len(result.evicted)
    granted: list[int] = []
    writes.reverse()
    while writes:
        part = writes[-parts.PART :]
        del writes[-parts.PART :]
        granted += [_make_writable(books, write, result) for write in reversed(part)]
        yield len(part)
    for (sequence, tokens), old_room in zip(rooms, old_rooms, strict=True):
        if tokens > old_room:
            sequence.room = len(sequence.table) * books.block_size
            first = old_room // books.block_size
            result.tables.append(TableChange(sequence.id, first, sequence.table[first:], sequence.room))
    if granted:
        first_sequence = rooms[0][0]
        evicted = result.evicted[seen:]
        result.deeds.append((_EXTEND, first_sequence.id, first_sequence.group, granted, evicted, None))


def _planned_writes(books: PoolState, rooms: list[tuple[Sequence, int]]) -> Generator[int, None, list[_Write]]:
    """List what has to be granted, changing nothing. Holders that move to a copy no longer count as sharing."""
    moved: dict[int, int] = {}
    writes = []
    for sequence, tokens in rooms:
        if tokens <= sequence.room:
            continue
        for part in parts_of(range(sequence.room // books.block_size, books.blocks_for(tokens))):
            for index in part:
                if index >= len(sequence.table):
                    writes.append(_Write(sequence, index, replaces=False))
                elif _needs_copy(books, block := sequence.table[index], moved.get(block, 0)):
                    moved[block] = moved.get(block, 0) + 1
                    writes.append(_Write(sequence, index, replaces=True))
            yield len(part)
    return writes


def _needs_copy(books: PoolState, block: int, moved: int) -> bool:
    return books.device.count(block) - moved > 1 or books.device.key(block) is not None


def _make_writable(books: PoolState, write: _Write, result: StepResult) -> int:
    block = books.grant_one(result)
    if not write.replaces:
        write.sequence.table.append(block)
        return block
    source = write.sequence.table[write.entry]
    write.sequence.table[write.entry] = block
    result.copies.append(Copy(source, block))
    if not books.device.is_findable(source):
        books.device.make_unfindable(block)
    if books.device.count(source) > 1:
        books.device.release(source)
    else:
        books.release_after_step((source,))
    return block
