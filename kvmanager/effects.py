"""What verbs did, for whoever keeps the history.

Verbs write plain tuples, because making a named one takes as long as half a verb. `effect_of` makes a typed effect of
a tuple where it is read. `blocks` are those that were committed, pinned, shared, given back, moved or granted.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blocks import Free, FreeReason, PinChange, StepItem
from kvmanager.tier.tier import Eviction

# Verb, sequence, group, blocks, what was evicted for it, and what else there is to say, by verb: a fork's child, the
# item of a free or a change of pins, an allocate's Allocation; None for others.
RawEffect = tuple[StepItem, int, int, Sequence[int], Sequence[Eviction], Any]


class Allocation(NamedTuple):
    """What else there is to say of an allocate. It is kept, so there is no token id in it.

    `hit_blocks` of the prompt were found, `missed` is the key of the next one; None: there was none to look for.
    """

    request_id: str
    prompt_tokens: int
    cached_tokens: int
    hit_blocks: int
    missed: bytes | None
    waited_seconds: float


class Committed(NamedTuple):
    """Blocks got their keys, or had them already."""

    sequence: int
    group: int
    blocks: Sequence[int]


class PinsChanged(NamedTuple):
    """Blocks were pinned, or given back tail first by an unpin, which has no sequence; a reset has no block either."""

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
    """A sequence gave its table back: host blocks while it was swapped."""

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
    """A sequence moved to these device blocks. What was evicted for a group is said of its first sequence."""

    sequence: int
    group: int
    blocks: Sequence[int]
    evicted: Sequence[Eviction]


class Extended(NamedTuple):
    """Blocks were granted to sequences of a group, the first of which is named."""

    sequence: int
    group: int
    blocks: Sequence[int]
    evicted: Sequence[Eviction]


class Allocated(NamedTuple):
    """A group has begun with this table."""

    sequence: int
    group: int
    blocks: Sequence[int]
    evicted: Sequence[Eviction]
    allocation: Allocation


Effect = Committed | PinsChanged | Forked | Freed | SwappedOut | SwappedIn | Extended | Allocated


def _freed(sequence: int, group: int, blocks: Sequence[int], _: Sequence[Eviction], item: Free) -> Freed:
    return Freed(sequence, group, blocks, item.reason, item.preempted_for_group)


_TYPED: dict[StepItem, Callable[[int, int, Sequence[int], Sequence[Eviction], Any], Effect]] = {
    StepItem.COMMIT: lambda sequence, group, blocks, _, __: Committed(sequence, group, blocks),
    StepItem.PIN: lambda sequence, group, blocks, _, change: PinsChanged(sequence, group, blocks, change),
    StepItem.FORK: lambda sequence, group, blocks, _, child: Forked(sequence, group, blocks, child),
    StepItem.FREE: _freed,
    StepItem.SWAP_OUT: lambda sequence, group, blocks, _, __: SwappedOut(sequence, group, blocks),
    StepItem.SWAP_IN: lambda sequence, group, blocks, evicted, _: SwappedIn(sequence, group, blocks, evicted),
    StepItem.EXTEND: lambda sequence, group, blocks, evicted, _: Extended(sequence, group, blocks, evicted),
    StepItem.ALLOCATE: Allocated,
}


def effect_of(raw: RawEffect) -> Effect:
    """Return what a verb wrote as an effect of its type."""
    return _TYPED[raw[0]](*raw[1:])
