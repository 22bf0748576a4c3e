"""The verbs of a pool with window kinds: what can be refused is planned in every kind before any of them changes.

Each kind has the same sequences with the same rooms and committed blocks, and makes its own changes as a pool of that
kind alone would.
"""

from collections.abc import Iterator, Sequence

from blocks import Allocate, Commit, Extend, Fork, Free, Pin, PinChange
from kvmanager.applied import Outcome
from kvmanager.errors import InvalidItem
from kvmanager.parts import Parts, parts_of
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.verbs import admission, growth, lifecycle, pinning, swapping
from kvmanager.verbs.boundaries import Boundary, finding_boundary
from kvmanager.verbs.trimming import forgetting, retained_boundaries


def _kinds(state: PoolState, outcome: Outcome) -> Iterator[tuple[PoolState, Outcome]]:
    """Yield each kind's state with the outcome for it, kind 0 first."""
    return zip(state.kinds, (outcome, *outcome.windows), strict=True)


def commit(state: PoolState, item: Commit, outcome: Outcome) -> Parts:
    """Set the keys of whole blocks in all kinds, except those that have left a window already."""
    parts = lifecycle.commit(state, item, outcome)
    yield from parts or ()
    sequence, blocks = state.sequences[item.sequence], outcome.effects[-1][3]
    for window, window_outcome in zip(state.windows, outcome.windows, strict=True):
        own = window.sequences[item.sequence]
        own.committed_blocks, own.last_key = sequence.committed_blocks, sequence.last_key
        yield from _sealing(state, window, own, item.first_index, blocks, window_outcome)


def _sealing(
    state: PoolState, window: PoolState, own: SequenceTable, first: int, blocks: Sequence[int], outcome: Outcome
) -> Parts:
    """Give the blocks of a window kind the keys of the `blocks` of kind 0 that begin at logical block `first`."""
    behind = min(len(blocks), max(0, own.dropped - first))
    entry = max(0, first - own.dropped)
    table = own.table[entry : entry + len(blocks) - behind]
    keys = state.device.keys.by_block
    for part in parts_of(zip(table, blocks[behind:], strict=True)):
        for block, other in part:
            if window.device.key(block) is None and (key := keys[other]) is not None:
                window.device.keys.seal(block, key)
                outcome.sealed_blocks.append(block)
                outcome.sealed_keys.append(key)
        yield len(part)
    outcome.effects.append((lifecycle.COMMIT, own.id, own.group, table, (), None))


def change_pins(state: PoolState, item: PinChange, outcome: Outcome) -> Parts:
    """Pin, unpin or reset in all kinds. A pin holds the blocks that a prompt which begins with its blocks needs."""
    if not isinstance(item, Pin):
        for kind, kind_outcome in _kinds(state, outcome):
            yield from pinning.change_pins(kind, item, kind_outcome)
        return
    pinned = []
    for kind in state.kinds:
        sequence = pinning.check_pin(kind, item)
        blocks = _pinned_blocks(kind, sequence, item.block_count)
        yield from pinning.checking_others_fit(kind, blocks)
        pinned.append(blocks)
    for (kind, kind_outcome), blocks in zip(_kinds(state, outcome), pinned, strict=True):
        yield from pinning.pinning(kind, item, blocks, kind_outcome)


def _pinned_blocks(state: PoolState, sequence: SequenceTable, count: int) -> list[int]:
    if state.kind is None:
        return sequence.table[:count]
    first = state.kind.first_block(count * state.block_size, state.block_size)
    if first < min(sequence.dropped, count):
        raise InvalidItem(f"block_count: block {first} has left the window of kind {state.kind_name}")
    return sequence.table[first - sequence.dropped : count - sequence.dropped] if first < count else []


def fork(state: PoolState, item: Fork, outcome: Outcome) -> Parts:
    """Add a sequence that shares the parent's blocks of all kinds below a length."""
    for kind in state.kinds:
        lifecycle.check_fork(kind, item)
    for kind, kind_outcome in _kinds(state, outcome):
        yield from lifecycle.fork(kind, item, kind_outcome)
        for sequence_id in (item.parent, item.child):
            kind.sequences[sequence_id].last_key = state.sequences[sequence_id].last_key


def free(state: PoolState, item: Free, outcome: Outcome) -> Parts:
    """Free a sequence in all kinds. Blocks whose keys are of no use behind its last token lose them."""
    for kind, kind_outcome in _kinds(state, outcome):
        if kind.kind and item.sequence in kind.sequences:
            yield from forgetting(kind, kind.sequences[item.sequence])
        yield from lifecycle.free(kind, item, kind_outcome) or ()


def swap_out(state: PoolState, group: int, outcome: Outcome) -> Parts:
    """Move a group to the host tiers of all kinds: only the blocks that its windows still have."""
    routes = []
    for kind in state.kinds:
        routes.append((yield from swapping.planning_swap(kind, group, swapped=False)))
    for (kind, kind_outcome), route in zip(_kinds(state, outcome), routes, strict=True):
        yield from swapping.swapping_out(kind, group, route, kind_outcome)


def swap_in(state: PoolState, group: int, outcome: Outcome) -> Parts:
    """Move a group back to the devices of all kinds."""
    routes = []
    for kind in state.kinds:
        routes.append((yield from swapping.planning_swap(kind, group, swapped=True)))
    for (kind, kind_outcome), route in zip(_kinds(state, outcome), routes, strict=True):
        yield from swapping.swapping_in(kind, group, route, kind_outcome)


def extend(state: PoolState, item: Extend, outcome: Outcome) -> Parts:
    """Add room in all kinds to all listed sequences of a group, or to none."""
    plans = []
    for kind in state.kinds:
        rooms = growth.rooms_of(kind, item)
        plans.append((rooms, (yield from growth.planning_writes(kind, rooms))))
    for (kind, kind_outcome), (rooms, writes) in zip(_kinds(state, outcome), plans, strict=True):
        yield from growth.writing(kind, rooms, writes, kind_outcome)


def allocate(state: PoolState, item: Allocate, outcome: Outcome) -> Parts:
    """Begin a group behind the longest cached prefix of which each kind has what the next token needs."""
    admission.check_allocate(state, item)
    spares = (*item.window_spares, *[0] * (len(state.windows) - len(item.window_spares)))
    if len(spares) > len(state.windows) or any(spare < 0 for spare in spares):
        raise InvalidItem(f"window_spares must be at most {len(state.windows)} numbers of at least 0")
    hits: list[admission.Hit] = []
    key = yield from admission.finding_prefix(state, hits, state.root(item.salt), item)
    boundary = yield from finding_boundary(state, hits)
    del hits[boundary.blocks :]
    prompt = state.blocks_for(len(item.token_ids))
    yield from admission.checking_fits(state, hits, prompt - len(hits), item.spare_blocks)
    for window, own_hits, spare in zip(state.windows, boundary.hits, spares, strict=True):
        more = _most_blocks(window, item) - len(own_hits)
        yield from admission.checking_fits(window, own_hits, min(prompt - boundary.blocks, max(0, more)), spare)
    missed = boundary.missed or admission.Missed(key)
    yield from admission.allocating(state, admission.new_sequence(state, item), hits, missed, item, outcome)
    for window, own_hits, window_outcome in zip(state.windows, boundary.hits, outcome.windows, strict=True):
        sequence = _begun(state, window, item, boundary, len(own_hits))
        yield from admission.allocating(window, sequence, own_hits, admission.Missed(None), item, window_outcome)


def _most_blocks(window: PoolState, item: Allocate) -> int:
    assert window.kind is not None
    return window.kind.most_blocks(min(item.compute_tokens, len(item.token_ids)), window.block_size)


def _begun(state: PoolState, window: PoolState, item: Allocate, boundary: Boundary, hits: int) -> SequenceTable:
    """Return a window kind's sequence that begins behind a boundary with this number of hits."""
    sequence, own = admission.new_sequence(window, item), state.sequences[item.sequence]
    sequence.dropped, sequence.trimmed_to = boundary.blocks - hits, boundary.blocks * state.block_size
    sequence.committed_blocks, sequence.last_key = own.committed_blocks, own.last_key
    sequence.computed_tokens = sequence.trimmed_to
    sequence.retained = retained_boundaries(len(item.token_ids), state.block_size, boundary)
    return sequence
