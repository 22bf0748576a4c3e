"""allocate: begins a group with the cached prefix of its prompt, from either tier, and its first blocks."""

from collections.abc import Generator, Iterable
from itertools import islice
from typing import NamedTuple

from blocks import Allocate, Copy, StepItem, TableChange, prefix_keys
from kvmanager import limits, parts
from kvmanager.applied import Outcome
from kvmanager.effects import Allocation
from kvmanager.errors import IdInUse, InvalidItem, OutOfBlocks, shortage
from kvmanager.parts import Parts, parts_of, pop_parts
from kvmanager.pool_state import PoolState, SequenceTable


class Hit(NamedTuple):
    """A block of a prompt's cached prefix. One of the two ids is 0."""

    key: bytes
    device_block: int
    host_block: int


class Missed(NamedTuple):
    """What ended a prefix: the `key` that was not found, None if nothing was missed, and the number of its kind.

    If it is a window kind's, `found_tokens` are those that kind 0 had.
    """

    key: bytes | None
    kind: int = 0
    found_tokens: int = 0


def allocate(state: PoolState, item: Allocate, outcome: Outcome) -> Parts:
    """Begin a group: acquire the cached prefix, and blocks for the tokens that are computed next."""
    check_allocate(state, item)
    sequence = new_sequence(state, item)
    hits: list[Hit] = []
    missed = Missed((yield from finding_prefix(state, hits, sequence.root, item)))
    yield from checking_fits(state, hits, state.blocks_for(len(item.token_ids)) - len(hits), item.spare_blocks)
    yield from allocating(state, sequence, hits, missed, item, outcome)


def new_sequence(state: PoolState, item: Allocate) -> SequenceTable:
    """Return the sequence of an item, without blocks."""
    root = state.root(item.salt)
    sequence = SequenceTable(item.sequence, item.group, item.request_id, item.salt, state.resets, root)
    sequence.prompt_tokens = len(item.token_ids)
    return sequence


def allocating(
    state: PoolState,
    sequence: SequenceTable,
    hits: list[Hit],
    missed: Missed,
    item: Allocate,
    outcome: Outcome,
) -> Parts:
    """Begin a group with these hits, which the caller has checked to fit. They are the last of its cached prefix."""
    evicted_before = len(outcome.evicted)
    outlived = yield from _counting_outlived(state, hits)
    if hits:
        yield from _acquiring_prefix(state, sequence, hits, outcome)
    room = min(sequence.prompt_tokens, sequence.computed_tokens + item.compute_tokens)
    for done in state.granting(sequence.table, state.blocks_for(room) - sequence.blocks, outcome):
        state.in_flight += sequence.table[len(state.in_flight) :]
        yield done
    for some in pop_parts(hits):  # in parts, because freeing a long list takes long
        yield len(some) // 4
    state.in_flight.clear()
    _add_sequence(state, sequence, missed, item, outcome, evicted_before, outlived)


def check_allocate(state: PoolState, item: Allocate) -> None:
    """Raise ItemRefused unless a group may begin so, if it fits."""
    state.check_new(item.sequence)
    if item.group in state.groups:
        raise IdInUse(f"group {item.group} already exists")
    if not item.token_ids or item.compute_tokens < 1 or item.spare_blocks < 0:
        raise InvalidItem("token_ids must not be empty, compute_tokens at least 1, spare_blocks at least 0")
    longest = limits.MAX_TABLE_BLOCKS * state.block_size
    if len(item.token_ids) > longest:
        raise InvalidItem(f"token_ids must have at most {longest} tokens, not {len(item.token_ids)}")


def finding_prefix(
    state: PoolState, hits: list[Hit], root: bytes, item: Allocate
) -> Generator[int, None, bytes | None]:
    """Append the longest cached prefix that leaves a token to compute to `hits`; return the first key not found.

    Nothing is reserved or refreshed.
    """
    keys = prefix_keys(root, item.token_ids, state.block_size)
    missed, found = None, parts.PART
    while found == parts.PART:
        before = len(hits)
        missed = _extend_prefix(state, hits, islice(keys, parts.PART))
        found = len(hits) - before
        yield found
    return missed


def checking_fits(state: PoolState, hits: list[Hit], more: int, spare: int) -> Parts:
    """Check that `more` blocks fit beside hits, and leave `spare` free. Raises OutOfBlocks."""
    promoted = idle = 0
    for some in parts_of(hits):
        on_device = [hit.device_block for hit in some if hit.device_block]
        promoted += len(some) - len(on_device)
        # Hits without a holder are available, but must not be counted as space for the rest of the prompt.
        idle += sum([state.device.ref_count(block) == 0 for block in on_device])
        yield len(some) // 4
    state.check_shares(len(hits))
    needed, available = more + promoted, state.device.available - idle
    if needed + spare > available:
        raise OutOfBlocks(shortage(needed, available, spare, idle, state.kind_name))


def _extend_prefix(state: PoolState, hits: list[Hit], keys: Iterable[bytes]) -> bytes | None:
    """Append the blocks of `keys` to `hits` up to the first key that is not found, which is returned."""
    device, host = state.device.keys, state.host.keys
    for key in keys:
        if (block := device.find(key)) is not None:
            hits.append(Hit(key, block, 0))
        elif (block := host.find(key)) is not None:
            hits.append(Hit(key, 0, block))
        else:
            return key
    return None


def _counting_outlived(state: PoolState, hits: list[Hit]) -> Generator[int, None, int]:
    """Count the hits that an earlier process of the engine computed; the return value is their number."""
    device, host, count = state.device.keys.outlived, state.host.keys.outlived, 0
    for some in parts_of(hits) if device or host else ():
        count += sum(hit.device_block in device or hit.host_block in host for hit in some)
        yield len(some) // 4
    return count


def _acquiring_prefix(state: PoolState, sequence: SequenceTable, hits: list[Hit], outcome: Outcome) -> Parts:
    for some in parts_of(hits):  # hold all hits before any grant, so that no grant evicts them
        state.in_flight += _hold_hits(state, some)
        yield len(some)
    for some in parts_of(hits):
        blocks = [hit.device_block or _promote(state, hit, outcome) for hit in some]
        state.in_flight += [block for block, hit in zip(blocks, some, strict=True) if not hit.device_block]
        sequence.table += blocks
        yield len(some)
    sequence.committed_blocks, sequence.last_key = sequence.blocks, hits[-1].key
    sequence.computed_tokens = sequence.blocks * state.block_size


def _add_sequence(
    state: PoolState,
    sequence: SequenceTable,
    missed: Missed,
    item: Allocate,
    outcome: Outcome,
    evicted_before: int,
    outlived: int,
) -> None:
    cached_tokens = sequence.computed_tokens
    sequence.room_tokens = sequence.blocks * state.block_size
    state.add(sequence)
    outcome.hit_tokens += cached_tokens
    outcome.query_tokens += len(item.token_ids)
    table = list(sequence.table)
    outcome.tables.append(TableChange(sequence.id, sequence.dropped, table, sequence.room_tokens, cached_tokens))
    hits, prompt = sequence.committed_blocks - sequence.dropped, len(item.token_ids)
    details = item.waited_seconds, item.prefix_of, outlived
    allocation = Allocation(item.request_id, prompt, cached_tokens, hits, missed.key, *details, *missed[1:])
    evicted = outcome.evicted[evicted_before:]
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


def _promote(state: PoolState, hit: Hit, outcome: Outcome) -> int:
    """Grant a device block for the contents of a host block."""
    block = state.grant_one(outcome)
    state.device.keys.seal(block, hit.key)
    outcome.sealed_blocks.append(block)
    outcome.sealed_keys.append(hit.key)
    outcome.host_to_device.append(Copy(hit.host_block, block))
    return block
