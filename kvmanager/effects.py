"""The effects of verbs, for the ledger and the observers.

Verbs append plain tuples, because making a named tuple takes as long as half a verb. `effect_of` converts a tuple to a
typed effect where it is read. `blocks` are the condemned, committed, pinned, shared, freed, moved or granted blocks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from blocks import Condemn, CondemnReason, Free, FreeReason, PinChange, StepItem
from kvmanager.tier.tier import Eviction

# Verb, sequence, group, blocks, evictions for it, and a detail by verb: the child of a fork; the item of a condemn, a
# free or of a pin change; the first logical block of a trim; the Allocation of an allocate; else None.
RawEffect = tuple[StepItem, int, int, Sequence[int], Sequence[Eviction], Any]


class Allocation(NamedTuple):
    """Details of an allocate. They are kept in the ledger, so they contain no token ids.

    The first `hit_blocks` of the prompt were cached, `outlived_blocks` of them by an earlier process of the engine.
    `missed` is the key of the block that ended the prefix, None if there was none: the next one; or one that only the
    window kind with number `missed_kind` lacked, while kind 0 had `found_tokens`.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    hit_blocks: int
    missed: bytes | None
    waited_seconds: float
    prefix_of: str
    outlived_blocks: int = 0
    missed_kind: int = 0
    found_tokens: int = 0


class Condemned(NamedTuple):
    """Blocks of a tier were withheld, held ones on release. Those that were already are not listed.

    `sequence` found it, 0 if none did. `group` is 0 if the sequence has ended.
    """

    sequence: int
    group: int
    blocks: Sequence[int]
    reason: CondemnReason
    host: bool
    kind: int


class Committed(NamedTuple):
    """Blocks have got their keys, or had them already."""

    sequence: int
    group: int
    blocks: Sequence[int]


class PinsChanged(NamedTuple):
    """Blocks were pinned, or released tail first by an unpin. An unpin has no sequence, a reset also no blocks."""

    sequence: int
    group: int
    blocks: Sequence[int]
    change: PinChange


class Forked(NamedTuple):
    """A sequence shares its blocks with `child`."""

    sequence: int
    group: int
    blocks: Sequence[int]
    child: int


class Freed(NamedTuple):
    """A sequence was freed. `blocks` are host blocks if it was swapped out."""

    sequence: int
    group: int
    blocks: Sequence[int]
    reason: FreeReason
    preempted_for_group: int


class SwappedOut(NamedTuple):
    """A sequence moved to these host blocks."""

    sequence: int
    group: int
    blocks: Sequence[int]


class SwappedIn(NamedTuple):
    """A sequence moved to these device blocks. The evictions for a group are listed with its first sequence."""

    sequence: int
    group: int
    blocks: Sequence[int]
    evicted: Sequence[Eviction]


class Extended(NamedTuple):
    """Blocks were granted to sequences of a group; `sequence` is the first of them."""

    sequence: int
    group: int
    blocks: Sequence[int]
    evicted: Sequence[Eviction]


class Trimmed(NamedTuple):
    """Blocks left a window kind's table, of which `first_block` was the first logical one."""

    sequence: int
    group: int
    blocks: Sequence[int]
    first_block: int


class Allocated(NamedTuple):
    """A group began with this table."""

    sequence: int
    group: int
    blocks: Sequence[int]
    evicted: Sequence[Eviction]
    allocation: Allocation


Effect = Condemned | Committed | PinsChanged | Forked | Freed | SwappedOut | SwappedIn | Extended | Trimmed | Allocated


def _condemned(sequence: int, group: int, blocks: Sequence[int], _: Sequence[Eviction], item: Condemn) -> Condemned:
    return Condemned(sequence, group, blocks, item.reason, item.host, item.kind)


def _freed(sequence: int, group: int, blocks: Sequence[int], _: Sequence[Eviction], item: Free) -> Freed:
    return Freed(sequence, group, blocks, item.reason, item.preempted_for_group)


_TYPED: dict[StepItem, Callable[[int, int, Sequence[int], Sequence[Eviction], Any], Effect]] = {
    StepItem.CONDEMN: _condemned,
    StepItem.COMMIT: lambda sequence, group, blocks, _, __: Committed(sequence, group, blocks),
    StepItem.PIN: lambda sequence, group, blocks, _, change: PinsChanged(sequence, group, blocks, change),
    StepItem.FORK: lambda sequence, group, blocks, _, child: Forked(sequence, group, blocks, child),
    StepItem.FREE: _freed,
    StepItem.SWAP_OUT: lambda sequence, group, blocks, _, __: SwappedOut(sequence, group, blocks),
    StepItem.SWAP_IN: lambda sequence, group, blocks, evicted, _: SwappedIn(sequence, group, blocks, evicted),
    StepItem.EXTEND: lambda sequence, group, blocks, evicted, _: Extended(sequence, group, blocks, evicted),
    StepItem.TRIM: lambda sequence, group, blocks, _, first: Trimmed(sequence, group, blocks, first),
    StepItem.ALLOCATE: Allocated,
}


def effect_of(raw: RawEffect) -> Effect:
    """Return the typed effect of a raw tuple."""
    return _TYPED[raw[0]](*raw[1:])


def condemned_in(effects: Sequence[RawEffect]) -> Iterator[Condemned]:
    """Yield what was condemned, by the first effects of a block step."""
    for raw in effects:
        if raw[0] is not StepItem.CONDEMN:
            return
        yield _condemned(*raw[1:])
