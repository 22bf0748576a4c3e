"""allocate: the first sequence of a group finds its prefix in the cache, in either tier, and gets its first blocks."""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple

from blocks import Allocate, Copy, StepItem, TableChange, prefix_keys
from kvmanager import limits, parts
from kvmanager.applied import Outcome
from kvmanager.errors import IdInUse, InvalidItem, OutOfBlocks
from kvmanager.parts import Rest, parts_of
from kvmanager.pool_state import PoolState, Sequence


class Hit(NamedTuple):
    """A block of a prompt's cached prefix: its key, and where it is. One of the two ids is 0."""

    key: bytes
    device_block: int
    host_block: int


class Prefix(NamedTuple):
    """The longest cached prefix of a prompt that leaves at least one token to compute, and the first key not found."""

    hits: list[Hit]
    missed: bytes | None


class Admission(NamedTuple):
    """What else there is to say of an allocate. It is kept, so there is no token id in it.

    `hit_blocks` of the prompt were found, `missed` is the key of the next one; None: there was none to look for.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    hit_blocks: int
    missed: bytes | None
    waited_seconds: float


def _extend_prefix(state: PoolState, hits: list[Hit], keys: Iterable[bytes]) -> bytes | None:
    """Look for a prompt's next blocks, and return the first key that is not found. Reserves and refreshes nothing."""
    for key in keys:
        if (block := state.device.keys.find(key)) is not None:
            hits.append(Hit(key, block, 0))
        elif (block := state.host.keys.find(key)) is not None:
            hits.append(Hit(key, 0, block))
        else:
            return key
    return None


def find_prefix(state: PoolState, root: bytes, token_ids: Items[int]) -> Prefix:
    """Look for a prompt's beginning, a block at a time. Reserves and refreshes nothing."""
    hits: list[Hit] = []
    missed = _extend_prefix(state, hits, prefix_keys(root, token_ids, state.block_size))
    return Prefix(hits, missed)


def allocate(state: PoolState, item: Allocate, outcome: Outcome) -> Rest | None:
    """Begin a group: take the cached prefix, and blocks for what will be computed next."""
    state.check_new(item.sequence)
    if item.group in state.groups:
        raise IdInUse(f"group {item.group} exists")
    if not item.token_ids or item.compute_tokens < 1 or item.spare_blocks < 0:
        raise InvalidItem("token_ids and compute_tokens must not be empty, spare_blocks not negative")
    if len(item.token_ids) > limits.LARGEST_TABLE * state.block_size:
        raise InvalidItem(f"a prompt of {len(item.token_ids)} tokens is longer than any table can be")
    root = state.root(item.salt)
    sequence = Sequence(item.sequence, item.group, item.request_id, item.salt, state.resets, root)
    sequence.prompt = len(item.token_ids)
    if len(item.token_ids) > parts.LONG * state.block_size:
        return _allocating(state, sequence, item, outcome)
    prefix = find_prefix(state, root, item.token_ids)
    state.check_shares(len(prefix.hits))
    on_device = [hit.device_block for hit in prefix.hits if hit.device_block]
    _check_fits(state, item, len(on_device), _idle(state, on_device))
    seen = len(outcome.evicted)
    _take_prefix(state, sequence, prefix.hits, outcome)
    cached_tokens = len(prefix.hits) * state.block_size
    room = min(len(item.token_ids), cached_tokens + item.compute_tokens)
    sequence.table += state.grant(state.blocks_for(room) - len(sequence.table), outcome)
    _begin(state, sequence, prefix.missed, item, outcome, seen)
    return None


def _allocating(state: PoolState, sequence: Sequence, item: Allocate, outcome: Outcome) -> Rest:
    """Allocate for a long prompt."""
    keys = prefix_keys(sequence.root, item.token_ids, state.block_size)
    hits: list[Hit] = []
    on_device, idle, missed = 0, 0, None
    for part in parts_of(keys):
        before = len(hits)
        missed = _extend_prefix(state, hits, part)
        new = [hit.device_block for hit in hits[before:] if hit.device_block]
        on_device, idle = on_device + len(new), idle + _idle(state, new)
        if missed is not None:
            break
        yield len(part)
    state.check_shares(len(hits))
    _check_fits(state, item, on_device, idle)
    seen = len(outcome.evicted)
    for some in parts_of(hits):
        state.under_way += _hold_hits(state, some)
        yield len(some)
    table = sequence.table
    for some in parts_of(hits):
        brought_back = [hit.device_block or _bring_back(state, hit, outcome) for hit in some]
        state.under_way += [block for block, hit in zip(brought_back, some, strict=True) if not hit.device_block]
        table += brought_back
        yield len(some)
    _note_prefix(state, sequence, hits)
    room = min(len(item.token_ids), len(hits) * state.block_size + item.compute_tokens)
    for done in state.granting(table, state.blocks_for(room) - len(table), outcome):
        state.under_way += table[len(state.under_way) :]
        yield done
    while hits:  # so many at once take long to be given back
        del hits[-parts.PART :]
        yield parts.PART // 4
    state.under_way.clear()
    _begin(state, sequence, missed, item, outcome, seen)


def _begin(
    state: PoolState, sequence: Sequence, missed: bytes | None, item: Allocate, outcome: Outcome, seen: int
) -> None:
    """Add a sequence that has its table; the evictions for it begin after the first `seen` ones."""
    cached_tokens = sequence.computed
    sequence.room = len(sequence.table) * state.block_size
    state.add(sequence)
    outcome.hit_tokens += cached_tokens
    outcome.query_tokens += len(item.token_ids)
    outcome.tables.append(TableChange(sequence.id, 0, list(sequence.table), sequence.room, cached_tokens))
    hits, prompt = sequence.committed, len(item.token_ids)
    story = Admission(item.request_id, prompt, cached_tokens, hits, missed, item.waited_seconds)
    evicted = outcome.evicted[seen:]
    outcome.effects.append((StepItem.ALLOCATE, sequence.id, sequence.group, sequence.table[:], evicted, story))


def _idle(state: PoolState, blocks: list[int]) -> int:
    """Count the device blocks that nobody holds: where they are hits, they are no space for others."""
    return sum(state.device.count(block) == 0 for block in blocks)


def _check_fits(state: PoolState, item: Allocate, on_device: int, idle_hits: int) -> None:
    needed = state.blocks_for(len(item.token_ids)) - on_device + item.spare_blocks
    if needed > state.device.available - idle_hits:
        raise OutOfBlocks(f"{needed} blocks are needed, {state.device.available - idle_hits} are free")


def _take_prefix(state: PoolState, sequence: Sequence, hits: list[Hit], outcome: Outcome) -> None:
    # All that is there is held before anything is granted, or a grant could evict it.
    _hold_hits(state, hits)
    for hit in hits:
        sequence.table.append(hit.device_block or _bring_back(state, hit, outcome))
    _note_prefix(state, sequence, hits)


def _hold_hits(state: PoolState, hits: list[Hit]) -> list[int]:
    """Hold the device blocks, which are returned, and refresh the host blocks."""
    held = [hit.device_block for hit in hits if hit.device_block]
    state.device.hold(held)
    if len(held) < len(hits):
        for hit in hits:
            if hit.host_block:
                state.host.touch(hit.host_block)
    return held


def _note_prefix(state: PoolState, sequence: Sequence, hits: list[Hit]) -> None:
    if hits:
        sequence.committed, sequence.key = len(hits), hits[-1].key
        sequence.computed = len(hits) * state.block_size


def _bring_back(state: PoolState, hit: Hit, outcome: Outcome) -> int:
    block = state.grant_one(outcome)
    state.device.keys.seal(block, hit.key)
    outcome.sealed_blocks.append(block)
    outcome.sealed_keys.append(hit.key)
    outcome.host_to_device.append(Copy(hit.host_block, block))
    return block
