"""What happened in a sandbox, as a person reads it in the log. `holders` has the sequences of each block, as before."""

from collections.abc import Mapping, Sequence

from blocks import FreeReason
from kvmanager import BlockState, Tier, state_of
from services.kvmanager.renderer import counted, joined, listed, verb

Holders = Mapping[int, Sequence[int]]


def began(number: int, tokens: int, shared: Sequence[int], granted: Sequence[int]) -> str:
    """Tell of a sequence that began, with blocks that it found and such that were granted."""
    text = f"Sequence {number} began with {counted(tokens, 'token')}"
    if not shared:
        return f"{text} in {listed(granted)}."
    text += f": {listed(shared)} already had its beginning and {verb(len(shared))} shared"
    return f"{text}, {listed(granted)} {verb(len(granted))} granted."


def grew(number: int, tokens: int, before: list[int], table: list[int], holders: Holders) -> str:
    """Tell of a sequence that got tokens, from its block tables before and after."""
    granted = table[len(before) :]
    replaced = [(old, new) for old, new in zip(before, table, strict=False) if old != new]
    text = f"Sequence {number} got {counted(tokens, 'token')} more"
    text += "".join(_copied(number, old, new, holders) for old, new in replaced)
    if granted:
        text += f"; {listed(granted)} {verb(len(granted))} granted"
    elif not replaced:
        text += f", for which its block {table[-1]} had room"
    return f"{text}."


def forked(number: int, child: int, table: list[int], device: Tier) -> str:
    """Tell of a sequence that was forked, from the table that both have."""
    counts = sorted({device.count(block) for block in table})
    told = f"count {counts[0]}" if len(counts) == 1 else f"counts {counts[0]} to {counts[-1]}"
    both = f"both have {listed(table)}, now of {told}"
    return f"Sequence {child} was forked from {number}: {both}; nothing was copied."


def rewrote(number: int, old: int, new: int, holders: Holders, *, copied: bool) -> str:
    """Tell of a last token that was written anew, from the last block before and after."""
    text = f"Sequence {number} wrote its last token anew"
    if copied:
        return f"{text}{_copied(number, old, new, holders)}."
    if old != new:
        return f"{text}; it was the only one in block {old}, so there was nothing to copy: block {new} was granted."
    return f"{text}, in place: nobody else holds block {old}."


def ended(number: int, reason: FreeReason, table: list[int], device: Tier) -> str:
    """Tell of a sequence that gave its blocks back, and where they are now."""
    places: dict[str, list[int]] = {}
    for block in table:
        state = state_of(device, block)
        places.setdefault("still held by others" if state is BlockState.HELD else state.name.lower(), []).append(block)
    parts = [f"{listed(blocks)} {verb(len(blocks), 'is', 'are')} {place}" for place, blocks in places.items()]
    return f"Sequence {number} {'was pruned' if reason is FreeReason.PRUNED else 'was freed'}: {joined(parts)}."


def given_up(evicted: list[int]) -> str:
    """Tell whose contents a grant has cost."""
    return f"For it the contents of {listed(evicted)} were given up."


def _copied(number: int, old: int, new: int, holders: Holders) -> str:
    others = [str(other) for other in holders[old] if other != number]
    if others:
        several = len(others) > 1
        who = f"sequence{'s' if several else ''} {joined(others)} {'hold' if several else 'holds'} too"
        return f"; it wrote into block {old}, which {who}: copied to block {new}"
    return f"; block {old} can be found by its key and is not overwritten: copied to block {new}"
