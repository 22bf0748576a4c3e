"""commit, fork, free: the lifecycle of a sequence after its allocation."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, islice

from blocks import Commit, Fork, Free, StepItem, TableChange, block_key, block_keys, counted
from kvmanager.applied import Outcome
from kvmanager.errors import InvalidItem
from kvmanager.parts import Parts, parts_of
from kvmanager.pool_state import PoolState, SequenceTable

COMMIT, _FORK, _FREE = StepItem.COMMIT, StepItem.FORK, StepItem.FREE


def commit(state: PoolState, item: Commit, outcome: Outcome) -> Parts | None:
    """Set the keys of whole blocks, chained to the sequence's last key."""
    sequence_id, first, token_ids = item
    sequence = state.sequences.get(sequence_id)
    if sequence is None or sequence.swapped:
        sequence = state.on_device(sequence_id)  # raises the refusal
    if len(token_ids) != state.block_size:
        return _committing(state, sequence, item, outcome)
    blocks = _commit_one(state, sequence, first, token_ids, outcome)
    outcome.effects.append((COMMIT, sequence_id, sequence.group, blocks, (), None))
    return None


def _commit_one(
    state: PoolState, sequence: SequenceTable, first: int, token_ids: Sequence[int], outcome: Outcome
) -> list[int]:
    """Commit one block, which a decoding sequence has filled."""
    if first != sequence.committed_blocks or (first + 1) * state.block_size > sequence.room_tokens:
        _whole_blocks(state, sequence, Commit(sequence.id, first, token_ids))  # raises the refusal
    block = sequence.table[first]
    device = state.device
    key = block_key(sequence.last_key, token_ids)
    old = device.key(block)
    if old is None:
        device.keys.seal(block, key)
        outcome.sealed_blocks.append(block)
        outcome.sealed_keys.append(key)
    else:
        _check_same_keys([block], [old], [key])
    sequence.last_key = key
    sequence.committed_blocks = first + 1
    return [block]


def _committing(state: PoolState, sequence: SequenceTable, item: Commit, outcome: Outcome) -> Parts:
    """Commit any number of blocks. Existing keys are compared before any key is set."""
    blocks = _whole_blocks(state, sequence, item)
    device = state.device
    some_keyed = device.keys.any_keyed(blocks)
    if some_keyed:
        keys = block_keys(sequence.last_key, item.token_ids, state.block_size)
        for part in parts_of(blocks):
            _check_same_keys(part, device.keys.keys_of(part), list(islice(keys, len(part))))
            yield len(part)
    keys = block_keys(sequence.last_key, item.token_ids, state.block_size)
    for part in parts_of(blocks):
        part_keys = list(islice(keys, len(part)))
        sequence.last_key = part_keys[-1]
        sequence.committed_blocks += len(part)
        work = len(part)
        if some_keyed:
            missing = [key is None for key in device.keys.keys_of(part)]
            part, part_keys = list(compress(part, missing)), list(compress(part_keys, missing))
        device.keys.seal_many(part, part_keys)
        outcome.sealed_blocks += part
        outcome.sealed_keys += part_keys
        yield work
    outcome.effects.append((COMMIT, sequence.id, sequence.group, blocks, (), None))


def _whole_blocks(state: PoolState, sequence: SequenceTable, item: Commit) -> list[int]:
    count, rest = divmod(len(item.token_ids), state.block_size)
    last = item.first_index + count
    if rest or not count:
        raise InvalidItem(
            f"token_ids must fill whole blocks of {state.block_size}, not have {counted(len(item.token_ids), 'token')}"
        )
    if item.first_index != sequence.committed_blocks:
        raise InvalidItem(
            f"first_index must be {sequence.committed_blocks}, the number of committed blocks, not {item.first_index}"
        )
    if last * state.block_size > sequence.room_tokens:
        raise InvalidItem(f"sequence {sequence.id} has room for {sequence.room_tokens} tokens, not for {last} blocks")
    return sequence.table[item.first_index : last]


def _check_same_keys(blocks: list[int], old_keys: list[bytes | None], keys: list[bytes]) -> None:
    # A block that a fork shares may be committed through both sequences, but has only one content.
    for block, old, key in zip(blocks, old_keys, keys, strict=True):
        if old is not None and old != key:
            raise InvalidItem(f"block {block} already has a different key")


def fork(state: PoolState, item: Fork, outcome: Outcome) -> Parts:
    """Add a sequence to the group that shares the parent's blocks below a length."""
    parent = check_fork(state, item)
    yield from state.releasing(_truncate(state, parent, item.length))
    for part in parts_of(parent.table):
        state.device.hold(part)
        state.in_flight += part
        yield len(part)
    state.in_flight.clear()
    child = replace(parent, id=item.child, table=list(parent.table))
    state.add(child)
    outcome.tables.append(TableChange(parent.id, parent.blocks, [], parent.room_tokens))
    outcome.tables.append(TableChange(child.id, child.dropped, list(child.table), child.room_tokens))
    outcome.effects.append((_FORK, parent.id, parent.group, child.table[:], (), child.id))


def check_fork(state: PoolState, item: Fork) -> SequenceTable:
    """Return the parent. Raises ItemRefused unless it can be forked."""
    parent = state.on_device(item.parent)
    state.check_new(item.child)
    least = max(1, parent.trimmed_to)
    if not least <= item.length <= parent.room_tokens:
        raise InvalidItem(
            f"length must be between {least} and {parent.room_tokens}, the room of the parent, not {item.length}"
        )
    state.check_shares(state.blocks_for(item.length) - parent.dropped)
    return parent


def _truncate(state: PoolState, sequence: SequenceTable, length: int) -> list[int]:
    """Remove the room beyond `length` tokens; return the removed blocks, which are still held."""
    keep = state.blocks_for(length) - sequence.dropped
    removed = sequence.table[keep:]
    del sequence.table[keep:]
    sequence.room_tokens = length
    sequence.computed_tokens = min(sequence.computed_tokens, length)
    whole = length // state.block_size
    if sequence.committed_blocks > whole:
        sequence.committed_blocks = whole
        if state.kind is None:  # of a window kind the block may have left the window
            sequence.last_key = _last_key(state, sequence)
    return removed


def _last_key(state: PoolState, sequence: SequenceTable) -> bytes:
    if not sequence.committed_blocks:
        return sequence.root
    key = state.device.key(sequence.table[sequence.committed_blocks - 1])
    assert key is not None, "committed blocks have keys"
    return key


def free(state: PoolState, item: Free, outcome: Outcome) -> Parts | None:
    """Free a sequence: release its table, tail first."""
    sequence = state.sequence(item.sequence)
    state.remove(sequence)
    outcome.effects.append((_FREE, sequence.id, sequence.group, sequence.table, (), item))  # the table is final
    if sequence.swapped:
        state.release_host_after_step(reversed(sequence.table))
        return None
    return state.releasing(sequence.table)
