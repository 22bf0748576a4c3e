"""trim: releases the blocks of window kinds that no later query sees, and decides which of them stay findable.

Keeping the keys of all blocks that leave a window would fill the prefix cache with blocks that no prompt can continue
behind, and push out those behind which many do (vllm issues 48435 and 52216). Kept are the windows before

* the last whole block of the prompt, behind which an equal prompt continues,
* the boundary at which the sequence itself began: what was hit once is hit again,
* a junction: where the blocks of kind 0 were cached further than those of a window kind (Marconi, arXiv 2411.19379),
* the end of the sequence, behind which a conversation continues,
* every `retention_tokens` tokens, if the pool has them.
"""

from blocks import StepItem, Trim
from kvmanager.applied import Outcome
from kvmanager.errors import InvalidItem
from kvmanager.parts import Parts, parts_of
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.verbs.boundaries import Boundary


def retained_boundaries(prompt_tokens: int, block_size: int, boundary: Boundary) -> tuple[int, ...]:
    """Return the numbers of leading blocks behind which later prompts may continue, for a sequence that begins."""
    return tuple(sorted({(prompt_tokens - 1) // block_size, boundary.blocks, boundary.found} - {0}))


def trim(state: PoolState, item: Trim, outcome: Outcome) -> Parts:
    """Release the blocks that only queries below a position see."""
    sequence = state.on_device(item.sequence)
    least = max((window.sequences[item.sequence].trimmed_to for window in state.windows), default=0)
    if not least <= item.position <= sequence.room_tokens:
        raise InvalidItem(f"position must be between {least} and {sequence.room_tokens}, not {item.position}")
    for window, window_outcome in zip(state.windows, outcome.windows, strict=True):
        yield from _trimming(window, window.sequences[item.sequence], item.position, window_outcome)


def _trimming(state: PoolState, sequence: SequenceTable, position: int, outcome: Outcome) -> Parts:
    assert state.kind is not None
    sequence.trimmed_to = position
    first, last = sequence.dropped, state.kind.first_block(position, state.block_size)
    if last <= first:
        return
    blocks = sequence.table[: last - first]
    yield from _forgetting(state, sequence, blocks, sequence.retained)
    del sequence.table[: last - first]
    sequence.dropped = last
    outcome.effects.append((StepItem.TRIM, sequence.id, sequence.group, blocks, (), first))
    yield from state.releasing(blocks[::-1])  # which begins at the end: the first block is granted first


def forgetting(state: PoolState, sequence: SequenceTable) -> Parts:
    """Remove the keys of a sequence that ends which are of no use behind its last committed block either."""
    if not sequence.swapped:
        yield from _forgetting(state, sequence, sequence.table, (*sequence.retained, sequence.committed_blocks))


def _forgetting(state: PoolState, sequence: SequenceTable, blocks: list[int], retained: tuple[int, ...]) -> Parts:
    """Remove the keys of blocks that no other sequence holds, and that no retained boundary needs.

    `blocks` are the first of the sequence's table.
    """
    tier, logical = state.device, sequence.dropped
    for part in parts_of(blocks):
        for block in part:
            is_last = tier.key(block) is not None and tier.ref_count(block) == 1 and not tier.marks.by_block[block]
            if is_last and not _is_retained(state, logical, retained):
                tier.keys.remove(block)
            logical += 1
        yield len(part)


def _is_retained(state: PoolState, logical: int, retained: tuple[int, ...]) -> bool:
    kind, size = state.kind, state.block_size
    assert kind is not None
    if interval := state.spec.retention_tokens // size:
        retained = (*retained, (logical // interval + 1) * interval)
    return any(kind.first_block(blocks * size, size) <= logical < blocks for blocks in retained)
