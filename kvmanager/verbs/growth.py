"""extend: room for more tokens, and copy-on-write."""

from collections.abc import Generator
from typing import NamedTuple

from blocks import Copy, Extend, StepItem, TableChange, blocks_for
from kvmanager import limits
from kvmanager.applied import Outcome
from kvmanager.errors import InvalidItem
from kvmanager.parts import Parts, parts_of, pop_parts
from kvmanager.pool_spec import MAX_ROOM_TOKENS
from kvmanager.pool_state import PoolState, SequenceTable

_EXTEND = StepItem.EXTEND


class _Write(NamedTuple):
    """A block to make writable: a new entry of the table, or the replacement of a shared or keyed one."""

    sequence: SequenceTable
    entry: int
    replaces: bool


def extend(state: PoolState, item: Extend, outcome: Outcome) -> Parts | None:
    """Make room in all named sequences of a group, or in none.

    Any block between the old room and the new length that is shared or keyed is replaced by a copy, last block or not;
    the last holder of a block without a key keeps it.
    """
    if len(item.rooms) == 1:
        ((number, tokens),) = item.rooms
        sequence = state.sequences.get(number)
        if sequence is None or sequence.swapped or sequence.group != item.group:
            sequence = _member(state, item.group, number)  # says what is wrong
        if sequence.room == len(sequence.table) * state.block_size:
            return _append(state, sequence, tokens, outcome)
    rooms = [(_member(state, item.group, number), tokens) for number, tokens in item.rooms]
    if len({number for number, _ in item.rooms}) < len(rooms):
        raise InvalidItem("a sequence is listed twice")
    return _rewriting(state, rooms, outcome)


def _member(state: PoolState, group: int, number: int) -> SequenceTable:
    member = state.on_device(number)
    if member.group != group:
        raise InvalidItem(f"sequence {number} is not of group {group}")
    return member


def _append(state: PoolState, sequence: SequenceTable, tokens: int, outcome: Outcome) -> Parts | None:
    """Extend one sequence whose blocks are all granted in full: nearly every extend is this one, by one block."""
    table = sequence.table
    first = len(table)
    needed = blocks_for(tokens, state.block_size) - first
    if needed <= 0:
        return None
    room = (first + needed) * state.block_size
    if room > MAX_ROOM_TOKENS or first + needed > limits.MAX_TABLE_BLOCKS:
        state.check_available(needed)
        raise InvalidItem(f"room for {room} tokens is more than any sequence can have")
    if needed > 1:
        return _appending(state, sequence, needed, outcome)
    seen = len(outcome.evicted)
    blocks = [state.grant_one(outcome)]
    table += blocks
    sequence.room = room
    number = sequence.id
    evicted = outcome.evicted[seen:] if len(outcome.evicted) > seen else ()
    outcome.tables.append(TableChange(number, first, blocks, room))
    outcome.effects.append((_EXTEND, number, sequence.group, blocks, evicted, None))
    return None


def _appending(state: PoolState, sequence: SequenceTable, needed: int, outcome: Outcome) -> Parts:
    state.check_available(needed)
    first, seen = len(sequence.table), len(outcome.evicted)
    yield from state.granting(sequence.table, needed, outcome)
    blocks = sequence.table[first:]
    sequence.room = len(sequence.table) * state.block_size
    outcome.tables.append(TableChange(sequence.id, first, blocks, sequence.room))
    outcome.effects.append((_EXTEND, sequence.id, sequence.group, blocks, outcome.evicted[seen:], None))


def _rewriting(state: PoolState, rooms: list[tuple[SequenceTable, int]], outcome: Outcome) -> Parts:
    # Counted before they are listed: a length out of all bounds must not cost memory.
    state.check_available(sum(max(0, state.blocks_for(tokens) - len(member.table)) for member, tokens in rooms))
    longest = max((tokens for _, tokens in rooms), default=0)
    if state.blocks_for(longest) > min(limits.MAX_TABLE_BLOCKS, MAX_ROOM_TOKENS // state.block_size):
        raise InvalidItem(f"room for {longest} tokens is more than any sequence can have")
    writes = yield from _planned_writes(state, rooms)
    state.check_available(len(writes))
    old_rooms = [sequence.room for sequence, _ in rooms]
    seen = len(outcome.evicted)
    granted: list[int] = []
    writes.reverse()
    for part in pop_parts(writes):
        granted += [_make_writable(state, write, outcome) for write in reversed(part)]
        yield len(part)
    for (sequence, tokens), old_room in zip(rooms, old_rooms, strict=True):
        if tokens > old_room:
            sequence.room = len(sequence.table) * state.block_size
            first = old_room // state.block_size
            outcome.tables.append(TableChange(sequence.id, first, sequence.table[first:], sequence.room))
    if granted:
        first_sequence = rooms[0][0]
        evicted = outcome.evicted[seen:]
        outcome.effects.append((_EXTEND, first_sequence.id, first_sequence.group, granted, evicted, None))


def _planned_writes(state: PoolState, rooms: list[tuple[SequenceTable, int]]) -> Generator[int, None, list[_Write]]:
    """List what has to be granted, changing nothing. Holders that move to a copy no longer count as sharing."""
    moved: dict[int, int] = {}
    writes = []
    for sequence, tokens in rooms:
        if tokens <= sequence.room:
            continue
        for part in parts_of(range(sequence.room // state.block_size, state.blocks_for(tokens))):
            for index in part:
                if index >= len(sequence.table):
                    writes.append(_Write(sequence, index, replaces=False))
                elif _needs_copy(state, block := sequence.table[index], moved.get(block, 0)):
                    moved[block] = moved.get(block, 0) + 1
                    writes.append(_Write(sequence, index, replaces=True))
            yield len(part)
    return writes


def _needs_copy(state: PoolState, block: int, moved: int) -> bool:
    return state.device.count(block) - moved > 1 or state.device.key(block) is not None


def _make_writable(state: PoolState, write: _Write, outcome: Outcome) -> int:
    block = state.grant_one(outcome)
    if not write.replaces:
        write.sequence.table.append(block)
        return block
    source = write.sequence.table[write.entry]
    write.sequence.table[write.entry] = block
    outcome.copies.append(Copy(source, block))
    if not state.device.marks.is_indexable(source):
        state.device.marks.unindex(block)
    if state.device.count(source) > 1:
        state.device.release((source,))
    else:
        state.release_after_step((source,))
    return block
