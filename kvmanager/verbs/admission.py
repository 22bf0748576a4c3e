"""allocate: the first sequence of a group finds its prefix in the cache, in either tier, and gets its first blocks."""

from collections.abc import Generator, Iterable
from itertools import islice
from typing import NamedTuple

from blocks import Allocate, Copy, StepItem, TableChange, prefix_keys
from kvmanager import limits, parts
from kvmanager.applied import Outcome
from kvmanager.effects import Allocation
from kvmanager.errors import IdInUse, InvalidItem, OutOfBlocks
from kvmanager.parts import Parts, parts_of, pop_parts
from kvmanager.pool_state import PoolState, SequenceTable


class Hit(NamedTuple):
    """A block of a prompt's cached prefix: its key, and where it is. One of the two ids is 0."""

    key: bytes
    device_block: int
    host_block: int


def allocate(state: PoolState, item: Allocate, outcome: Outcome) -> Parts:
    """Begin a group: take the cached prefix, and blocks for what will be computed next."""
    _check(state, item)
    sequence = SequenceTable(item.sequence, item.group, item.request_id, item.salt, state.resets, state.root(item.salt))
    sequence.prompt = len(item.token_ids)
    hits: list[Hit] = []
    missed = yield from _finding_prefix(state, hits, sequence.root, item)
    seen = len(outcome.evicted)
    if hits:
        yield from _taking_prefix(state, sequence, hits, outcome)
    room = min(sequence.prompt, sequence.computed + item.compute_tokens)
    for done in state.granting(sequence.table, state.blocks_for(room) - len(sequence.table), outcome):
        state.under_way += sequence.table[len(state.under_way) :]
        yield done
    for some in pop_parts(hits):  # so many at once take long to be given back
        yield len(some) // 4
    state.under_way.clear()
    _begin(state, sequence, missed, item, outcome, seen)


def _check(state: PoolState, item: Allocate) -> None:
    state.check_new(item.sequence)
    if item.group in state.groups:
        raise IdInUse(f"group {item.group} exists")
    if not item.token_ids or item.compute_tokens < 1 or item.spare_blocks < 0:
        raise InvalidItem("token_ids and compute_tokens must not be empty, spare_blocks not negative")
    if len(item.token_ids) > limits.MAX_TABLE_BLOCKS * state.block_size:
        raise InvalidItem(f"a prompt of {len(item.token_ids)} tokens is longer than any table can be")


def _finding_prefix(
    state: PoolState, hits: list[Hit], root: bytes, item: Allocate
) -> Generator[int, None, bytes | None]:
    """Find the longest cached prefix that leaves a token to compute; return the first key that is not found.

    It reserves and refreshes nothing. Raises OutOfBlocks where the prompt does not fit beside it.
    """
    keys = prefix_keys(root, item.token_ids, state.block_size)
    on_device, idle, missed, found = 0, 0, None, parts.PART
    while found == parts.PART:
        before = len(hits)
        missed = _extend_prefix(state, hits, islice(keys, parts.PART))
        found = len(hits) - before
        new = [hit.device_block for hit in hits[before:] if hit.device_block]
        # Hits that nobody holds are no space for others.
        on_device, idle = on_device + len(new), idle + sum(state.device.count(block) == 0 for block in new)
        yield found
    state.check_shares(len(hits))
    needed = state.blocks_for(len(item.token_ids)) - on_device + item.spare_blocks
    if needed > state.device.available - idle:
        raise OutOfBlocks(f"{needed} blocks are needed, {state.device.available - idle} are free")
    return missed


def _extend_prefix(state: PoolState, hits: list[Hit], keys: Iterable[bytes]) -> bytes | None:
    """Look for a prompt's next blocks, and return the first key that is not found."""
    device, host = state.device.keys, state.host.keys
    for key in keys:
        if (block := device.find(key)) is not None:
            hits.append(Hit(key, block, 0))
        elif (block := host.find(key)) is not None:
            hits.append(Hit(key, 0, block))
        else:
            return key
    return None


def _taking_prefix(state: PoolState, sequence: SequenceTable, hits: list[Hit], outcome: Outcome) -> Parts:
    for some in parts_of(hits):  # all of them before anything is granted, or a grant could evict them
        state.under_way += _hold_hits(state, some)
        yield len(some)
    for some in parts_of(hits):
        brought_back = [hit.device_block or _bring_back(state, hit, outcome) for hit in some]
        state.under_way += [block for block, hit in zip(brought_back, some, strict=True) if not hit.device_block]
        sequence.table += brought_back
        yield len(some)
    sequence.committed, sequence.key = len(hits), hits[-1].key
    sequence.computed = len(hits) * state.block_size


def _begin(
    state: PoolState, sequence: SequenceTable, missed: bytes | None, item: Allocate, outcome: Outcome, seen: int
) -> None:
    """Add a sequence that has its table; the evictions for it begin after the first `seen` ones."""
    cached_tokens = sequence.computed
    sequence.room = len(sequence.table) * state.block_size
    state.add(sequence)
    outcome.hit_tokens += cached_tokens
    outcome.query_tokens += len(item.token_ids)
    outcome.tables.append(TableChange(sequence.id, 0, list(sequence.table), sequence.room, cached_tokens))
    hits, prompt = sequence.committed, len(item.token_ids)
    allocation = Allocation(item.request_id, prompt, cached_tokens, hits, missed, item.waited_seconds)
    evicted = outcome.evicted[seen:]
    outcome.effects.append((StepItem.ALLOCATE, sequence.id, sequence.group, sequence.table[:], evicted, allocation))


def _hold_hits(state: PoolState, hits: list[Hit]) -> list[int]:
    """Hold the device blocks, which are returned, and refresh the host blocks."""
    held = [hit.device_block for hit in hits if hit.device_block]
    state.device.hold(held)
    if len(held) < len(hits):
        for hit in hits:
            if hit.host_block:
                state.host.touch(hit.host_block)
    return held


def _bring_back(state: PoolState, hit: Hit, outcome: Outcome) -> int:
    block = state.grant_one(outcome)
    state.device.keys.seal(block, hit.key)
    outcome.sealed_blocks.append(block)
    outcome.sealed_keys.append(hit.key)
    outcome.host_to_device.append(Copy(hit.host_block, block))
    return block
