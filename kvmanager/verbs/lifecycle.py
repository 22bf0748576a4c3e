"""commit, fork, free: what happens to a sequence between its first block and its end."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress, islice

from blocks import Commit, Fork, Free, StepItem, TableChange, block_key, block_keys
from kvmanager.applied import Outcome
from kvmanager.errors import InvalidItem
from kvmanager.parts import Parts, parts_of
from kvmanager.pool_state import PoolState, SequenceTable

_COMMIT, _FORK, _FREE = StepItem.COMMIT, StepItem.FORK, StepItem.FREE


def commit(state: PoolState, item: Commit, outcome: Outcome) -> Parts | None:
    """Give whole blocks their keys, chained to the sequence's last one."""
    number, first, token_ids = item
    sequence = state.sequences.get(number)
    if sequence is None or sequence.swapped:
        sequence = state.on_device(number)  # says what is wrong
    if len(token_ids) != state.block_size:
        return _committing(state, sequence, item, outcome)
    blocks = _commit_one(state, sequence, first, token_ids, outcome)
    outcome.effects.append((_COMMIT, number, sequence.group, blocks, (), None))
    return None


def _commit_one(
    state: PoolState, sequence: SequenceTable, first: int, token_ids: Sequence[int], outcome: Outcome
) -> list[int]:
    """Commit one block: a decoding sequence has filled it."""
    if first != sequence.committed or (first + 1) * state.block_size > sequence.room:
        _whole_blocks(state, sequence, Commit(sequence.id, first, token_ids))  # says what is wrong
    block = sequence.table[first]
    device = state.device
    key = block_key(sequence.key, token_ids)
    old = device.key(block)
    if old is None:
        device.keys.seal(block, key)
        outcome.sealed_blocks.append(block)
        outcome.sealed_keys.append(key)
    else:
        _check_same_keys([block], [old], [key])
    sequence.key = key
    sequence.committed = first + 1
    return [block]


def _committing(state: PoolState, sequence: SequenceTable, item: Commit, outcome: Outcome) -> Parts:
    """Commit any number of blocks. Where some have keys already, all are compared before any is given."""
    blocks = _whole_blocks(state, sequence, item)
    device = state.device
    some_keyed = device.keys.any_keyed(blocks)
    if some_keyed:
        keys = block_keys(sequence.key, item.token_ids, state.block_size)
        for part in parts_of(blocks):
            _check_same_keys(part, device.keys.of_many(part), list(islice(keys, len(part))))
            yield len(part)
    keys = block_keys(sequence.key, item.token_ids, state.block_size)
    for part in parts_of(blocks):
        part_keys = list(islice(keys, len(part)))
        sequence.key = part_keys[-1]
        sequence.committed += len(part)
        work = len(part)
        if some_keyed:
            missing = [key is None for key in device.keys.of_many(part)]
            part, part_keys = list(compress(part, missing)), list(compress(part_keys, missing))
        device.keys.seal_many(part, part_keys)
        outcome.sealed_blocks += part
        outcome.sealed_keys += part_keys
        yield work
    outcome.effects.append((_COMMIT, sequence.id, sequence.group, blocks, (), None))


def _whole_blocks(state: PoolState, sequence: SequenceTable, item: Commit) -> list[int]:
    count, rest = divmod(len(item.token_ids), state.block_size)
    last = item.first_index + count
    if rest or not count:
        raise InvalidItem(f"token_ids has {len(item.token_ids)} tokens, which is not a whole number of blocks")
    if item.first_index != sequence.committed:
        raise InvalidItem(f"first_index is {item.first_index}, but {sequence.committed} blocks are committed")
    if last * state.block_size > sequence.room:
        raise InvalidItem(f"sequence {sequence.id} has room for {sequence.room} tokens, not for {last} blocks")
    return sequence.table[item.first_index : last]


def _check_same_keys(blocks: list[int], old_keys: list[bytes | None], keys: list[bytes]) -> None:
    # A block shared by a fork may be committed through either sequence, but it has only one content.
    for block, old, key in zip(blocks, old_keys, keys, strict=True):
        if old is not None and old != key:
            raise InvalidItem(f"block {block} has another key already")


def fork(state: PoolState, item: Fork, outcome: Outcome) -> Parts:
    """Let a new sequence of the same group share the blocks below a length."""
    parent = state.on_device(item.parent)
    state.check_new(item.child)
    if not 1 <= item.length <= parent.room:
        raise InvalidItem(f"length is {item.length}, the parent has room for {parent.room} tokens")
    state.check_shares(state.blocks_for(item.length))
    yield from state.releasing(_cut(state, parent, item.length))
    for part in parts_of(parent.table):
        state.device.hold(part)
        state.under_way += part
        yield len(part)
    state.under_way.clear()
    child = replace(parent, id=item.child, table=list(parent.table))
    state.add(child)
    outcome.tables.append(TableChange(parent.id, len(parent.table), [], parent.room))
    outcome.tables.append(TableChange(child.id, 0, list(child.table), child.room))
    outcome.effects.append((_FORK, parent.id, parent.group, child.table[:], (), child.id))


def _cut(state: PoolState, sequence: SequenceTable, length: int) -> list[int]:
    """Take the room beyond `length` tokens away, and return the blocks that are left over, which are still held."""
    keep = state.blocks_for(length)
    dropped = sequence.table[keep:]
    del sequence.table[keep:]
    sequence.room = length
    sequence.computed = min(sequence.computed, length)
    whole = length // state.block_size
    if sequence.committed > whole:
        sequence.committed = whole
        sequence.key = _last_key(state, sequence)
    return dropped


def _last_key(state: PoolState, sequence: SequenceTable) -> bytes:
    if not sequence.committed:
        return sequence.root
    key = state.device.key(sequence.table[sequence.committed - 1])
    assert key is not None, "committed blocks have keys"
    return key


def free(state: PoolState, item: Free, outcome: Outcome) -> Parts | None:
    """Give a sequence's table back, tail first."""
    sequence = state.sequence(item.sequence)
    state.remove(sequence)
    outcome.effects.append((_FREE, sequence.id, sequence.group, sequence.table, (), item))  # nobody changes it any more
    if sequence.swapped:
        state.release_host_after_step(reversed(sequence.table))
        return None
    return state.releasing(sequence.table)
