"""Messages of the sandbox's log. `holders` maps each block to its sequences before the operation."""

from collections.abc import Mapping, Sequence

from blocks import FreeReason, counted
from kvmanager import BlockState, Tier, state_of
from services.kvmanager.renderer import joined, listed, verb

Holders = Mapping[int, Sequence[int]]


def began(sequence_id: int, tokens: int, shared: Sequence[int], granted: Sequence[int]) -> str:
    """Return the message for a new sequence with its cached and its granted blocks."""
    text = f"Sequence {sequence_id} began with {counted(tokens, 'token')}"
    if not shared:
        return f"{text} in {listed(granted)}."
    text += f": its prefix was cached in {listed(shared)}, which {verb(len(shared))} shared"
    return f"{text}, {listed(granted)} {verb(len(granted))} granted."


def grew(sequence_id: int, tokens: int, before: list[int], table: list[int], holders: Holders) -> str:
    """Return the message for appended tokens, from the block tables before and after."""
    granted = table[len(before) :]
    replaced = [(old, new) for old, new in zip(before, table, strict=False) if old != new]
    text = f"Sequence {sequence_id} grew by {counted(tokens, 'token')}"
    text += "".join(_copied(sequence_id, old, new, holders) for old, new in replaced)
    if granted:
        text += f"; {listed(granted)} {verb(len(granted))} granted"
    elif not replaced:
        text += f", which fit into block {table[-1]}"
    return f"{text}."


def forked(sequence_id: int, child: int, table: list[int], device: Tier) -> str:
    """Return the message for a fork, from the table that both sequences share."""
    counts = sorted({device.ref_count(block) for block in table})
    shown = f"reference count {counts[0]}" if len(counts) == 1 else f"reference counts {counts[0]} to {counts[-1]}"
    shared = f"both share {listed(table)}, now with {shown}"
    return f"Sequence {child} was forked from {sequence_id}: {shared}; no block was copied."


def rewrote(sequence_id: int, old: int, new: int, holders: Holders, *, copied: bool) -> str:
    """Return the message for a rewritten last token, from the last block before and after."""
    text = f"Sequence {sequence_id} rewrote its last token"
    if copied:
        return f"{text}{_copied(sequence_id, old, new, holders)}."
    if old != new:
        return f"{text}, the only one in block {old}, so no copy was needed: block {new} was granted."
    return f"{text} in place, because block {old} has no other holder."


def ended(sequence_id: int, reason: FreeReason, table: list[int], device: Tier) -> str:
    """Return the message for a freed sequence, with the present states of its blocks."""
    states: dict[str, list[int]] = {}
    for block in table:
        state = state_of(device, block)
        name = "still held by other sequences" if state is BlockState.HELD else state.name.lower()
        states.setdefault(name, []).append(block)
    parts = [f"{listed(blocks)} {verb(len(blocks), 'is', 'are')} {name}" for name, blocks in states.items()]
    return f"Sequence {sequence_id} {'was pruned' if reason is FreeReason.PRUNED else 'was freed'}: {joined(parts)}."


def evicted(blocks: list[int]) -> str:
    """Return the message for evicted blocks."""
    return f"{listed(blocks).capitalize()} {verb(len(blocks))} evicted."


def _copied(sequence_id: int, old: int, new: int, holders: Holders) -> str:
    others = [str(other) for other in holders[old] if other != sequence_id]
    if others:
        several = len(others) > 1
        holders_text = f"sequence{'s' if several else ''} {joined(others)}"
        return f"; block {old} is shared with {holders_text} and was copied to block {new}"
    return f"; block {old} is in the prefix cache and was copied to block {new}"
