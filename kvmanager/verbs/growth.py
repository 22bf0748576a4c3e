"""extend: adds room for tokens, with copy-on-write."""

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


class TableWrite(NamedTuple):
    """A table entry to make writable: a new one, or one whose shared or keyed block is replaced by a copy."""

    sequence: SequenceTable
    entry: int
    replaces: bool


def extend(state: PoolState, item: Extend, outcome: Outcome) -> Parts | None:
    """Add room to all listed sequences of a group, or to none.

    Every shared or keyed block between the old room and the new length is replaced by a copy. Of the holders of an
    unkeyed block, the last one keeps it.
    """
    if len(item.rooms) == 1:
        ((sequence_id, tokens),) = item.rooms
        sequence = state.sequences.get(sequence_id)
        if sequence is None or sequence.swapped or sequence.group != item.group:
            sequence = _member(state, item.group, sequence_id)  # raises the refusal
        if sequence.room_tokens == len(sequence.table) * state.block_size:
            return _append(state, sequence, tokens, outcome)
    return _rewriting(state, rooms_of(state, item), outcome)


def _member(state: PoolState, group: int, sequence_id: int) -> SequenceTable:
    member = state.on_device(sequence_id)
    if member.group != group:
        raise InvalidItem(f"sequence {sequence_id} is not in group {group}")
    return member


def _append(state: PoolState, sequence: SequenceTable, tokens: int, outcome: Outcome) -> Parts | None:
    """Extend one sequence that needs no copy: the usual extend, by one block."""
    table = sequence.table
    first = len(table)
    needed = blocks_for(tokens, state.block_size) - first
    if needed <= 0:
        return None
    room = (first + needed) * state.block_size
    if room > MAX_ROOM_TOKENS or first + needed > limits.MAX_TABLE_BLOCKS:
        state.check_available(needed)
        raise InvalidItem(_too_long(state, tokens))
    if needed > 1:
        return _appending(state, sequence, needed, outcome)
    evicted_before = len(outcome.evicted)
    blocks = [state.grant_one(outcome)]
    table += blocks
    sequence.room_tokens = room
    sequence_id = sequence.id
    evicted = outcome.evicted[evicted_before:] if len(outcome.evicted) > evicted_before else ()
    outcome.tables.append(TableChange(sequence_id, first, blocks, room))
    outcome.effects.append((_EXTEND, sequence_id, sequence.group, blocks, evicted, None))
    return None


def _appending(state: PoolState, sequence: SequenceTable, needed: int, outcome: Outcome) -> Parts:
    state.check_available(needed)
    first, evicted_before = len(sequence.table), len(outcome.evicted)
    yield from state.granting(sequence.table, needed, outcome)
    blocks = sequence.table[first:]
    sequence.room_tokens = len(sequence.table) * state.block_size
    outcome.tables.append(TableChange(sequence.id, first, blocks, sequence.room_tokens))
    outcome.effects.append((_EXTEND, sequence.id, sequence.group, blocks, outcome.evicted[evicted_before:], None))


def _rewriting(state: PoolState, rooms: list[tuple[SequenceTable, int]], outcome: Outcome) -> Parts:
    yield from writing(state, rooms, (yield from planning_writes(state, rooms)), outcome)


def rooms_of(state: PoolState, item: Extend) -> list[tuple[SequenceTable, int]]:
    """Return the sequences of an item with their new rooms. Raises UnknownSequence and InvalidItem."""
    rooms = [(_member(state, item.group, sequence_id), tokens) for sequence_id, tokens in item.rooms]
    if len({sequence_id for sequence_id, _ in item.rooms}) < len(rooms):
        raise InvalidItem("a sequence is listed twice")
    return rooms


def planning_writes(state: PoolState, rooms: list[tuple[SequenceTable, int]]) -> Generator[int, None, list[TableWrite]]:
    """Return the writes to tables that give sequences their rooms, changing nothing.

    Raises OutOfBlocks, and InvalidItem if a room is too long.
    """
    # Counted before they are listed, because an excessive length must not use memory.
    state.check_available(sum(max(0, state.blocks_for(tokens) - member.blocks) for member, tokens in rooms))
    longest = max((tokens for _, tokens in rooms), default=0)
    if state.blocks_for(longest) > min(limits.MAX_TABLE_BLOCKS, MAX_ROOM_TOKENS // state.block_size):
        raise InvalidItem(_too_long(state, longest))
    writes = yield from _listing_writes(state, rooms)
    state.check_available(len(writes))
    return writes


def writing(
    state: PoolState, rooms: list[tuple[SequenceTable, int]], writes: list[TableWrite], outcome: Outcome
) -> Parts:
    """Make planned writes, and give the sequences their rooms."""
    old_rooms = [sequence.room_tokens for sequence, _ in rooms]
    evicted_before = len(outcome.evicted)
    granted: list[int] = []
    writes.reverse()
    for part in pop_parts(writes):
        granted += [_make_writable(state, write, outcome) for write in reversed(part)]
        yield len(part)
    for (sequence, tokens), old_room in zip(rooms, old_rooms, strict=True):
        if tokens > old_room:
            sequence.room_tokens = sequence.blocks * state.block_size
            first = old_room // state.block_size
            blocks = sequence.table[first - sequence.dropped :]
            outcome.tables.append(TableChange(sequence.id, first, blocks, sequence.room_tokens))
    if granted:
        first_sequence = rooms[0][0]
        evicted = outcome.evicted[evicted_before:]
        outcome.effects.append((_EXTEND, first_sequence.id, first_sequence.group, granted, evicted, None))


def _too_long(state: PoolState, tokens: int) -> str:
    longest = min(limits.MAX_TABLE_BLOCKS, MAX_ROOM_TOKENS // state.block_size) * state.block_size
    return f"tokens must be at most {longest}, not {tokens}"


def _listing_writes(state: PoolState, rooms: list[tuple[SequenceTable, int]]) -> Generator[int, None, list[TableWrite]]:
    """Return the blocks to grant, changing nothing. Holders that move to a copy no longer count as sharing."""
    moved: dict[int, int] = {}
    writes = []
    for sequence, tokens in rooms:
        if tokens <= sequence.room_tokens:
            continue
        for part in parts_of(range(sequence.room_tokens // state.block_size, state.blocks_for(tokens))):
            for logical in part:
                entry = logical - sequence.dropped
                if entry >= len(sequence.table):
                    writes.append(TableWrite(sequence, entry, replaces=False))
                elif _needs_copy(state, block := sequence.table[entry], moved.get(block, 0)):
                    moved[block] = moved.get(block, 0) + 1
                    writes.append(TableWrite(sequence, entry, replaces=True))
            yield len(part)
    return writes


def _needs_copy(state: PoolState, block: int, moved: int) -> bool:
    return state.device.ref_count(block) - moved > 1 or state.device.key(block) is not None


def _make_writable(state: PoolState, write: TableWrite, outcome: Outcome) -> int:
    block = state.grant_one(outcome)
    if not write.replaces:
        write.sequence.table.append(block)
        return block
    source = write.sequence.table[write.entry]
    write.sequence.table[write.entry] = block
    outcome.copies.append(Copy(source, block))
    if not state.device.marks.is_indexable(source):
        state.device.marks.unindex(block)
    if state.device.ref_count(source) > 1:
        state.device.release((source,))
    else:
        state.release_after_step((source,))
    return block
