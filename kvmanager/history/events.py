"""Ledger entries of block steps, and the events that are made of them on reading.

Entries contain no token ids, and events no block keys. An entry of an allocate keeps the request id and the first key
that was not cached.
"""

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from blocks import KEY_BYTES, CondemnReason, FreeReason, StepItem, StepRefusal
from kvmanager.effects import Allocation

# Memory of an entry and its parts in bytes, measured and rounded up. An extra contains a request id.
_ENTRY_BYTES, _EFFECT_BYTES, _EXTRA_BYTES, _REFUSED_BYTES, _EVICTED_BYTES = 400, 90, 300, 280, 76
_REQUEST_ID, _DETAIL = 3, 5  # fields of RefusedItem


class PoolChange(Enum):
    """A change of a pool as a whole."""

    ATTACHED = 1  # replaces an older pool of the engine, if any
    DETACHED = 2
    WITHHELD = 3  # the audit took device blocks out of circulation
    HOST_WITHHELD = 4


class Event(NamedTuple):
    """An applied or refused verb, or a `change` of a pool as a whole, which has no step and no item.

    `ranges` are the first and last ids of the affected blocks: host blocks for a swap_out, for blocks withheld in the
    host tier, and for a condemn with `host`, else device blocks. `waited_seconds` is the time that an allocate's group
    waited, and `prefix_of` the request that computed their common prefix meanwhile. `evicted` are the keyed blocks that
    were evicted for the verb. `detail` is the message of a refusal. `kind` is the name of the blocks' window kind,
    empty for kind 0.
    """

    number: int
    engine_id: str
    step: int = 0
    item: StepItem | None = None
    sequence: int = 0
    group: int = 0
    request_id: str = ""
    ranges: tuple[tuple[int, int], ...] = ()
    refusal: StepRefusal | None = None
    detail: str = ""
    free_reason: FreeReason | None = None
    preempted_for_group: int = 0
    cached_tokens: int = 0
    waited_seconds: float = 0.0
    evicted: tuple[int, ...] = ()
    prefix_of: str = ""
    change: PoolChange | None = None
    kind: str = ""
    condemn_reason: CondemnReason | None = None
    host: bool = False


class CondemnDetails(NamedTuple):
    """Details of a condemn: the value of its CondemnReason, and its tier."""

    reason: int
    host: bool


class FreeDetails(NamedTuple):
    """Details of a free: the value of its FreeReason, and the group for which it was preempted."""

    reason: int
    preempted_for_group: int


class RefusedItem(NamedTuple):
    """A refused verb. Item, reason and `free_reason` are enum values; `free_reason` is 0 for other verbs."""

    item: int
    sequence: int
    group: int
    request_id: str
    reason: int
    detail: str
    free_reason: int = 0
    preempted_for_group: int = 0
    waited_seconds: float = 0.0


class Entry(NamedTuple):
    """The ledger's record of a block step, or of a change of a pool as a whole. Its first event has number `first`.

    The effects are stored in columns of plain tuples, bytes, numbers and strings, because the ledger keeps a hundred
    thousand events and the garbage collector must not traverse each of them.
    """

    first: int
    attachment: int
    step: int = 0
    change: int = 0
    items: bytes = b""  # values of StepItem
    sequences: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    request_ids: tuple[str | None, ...] = ()
    block_counts: tuple[int, ...] = ()
    blocks: bytes = b""  # of all effects, as 32-bit numbers
    extras: tuple[object, ...] = ()  # details of each effect as plain tuples; empty if no effect has any
    eviction_counts: tuple[int, ...] = ()  # empty if nothing was evicted
    evicted_blocks: tuple[int, ...] = ()
    evicted_keys: bytes = b""
    refused: tuple[tuple[object, ...], ...] = ()
    kinds: bytes = b""  # the number of each effect's kind of blocks; empty if all are of kind 0

    @property
    def size(self) -> int:
        """Number of events: the effects in order, then the refused items."""
        return 1 if self.change else len(self.items) + len(self.refused)

    @property
    def weight(self) -> int:
        """Approximate memory in bytes."""
        texts = sum([len(str(one[_REQUEST_ID])) + len(str(one[_DETAIL])) for one in self.refused])
        return (
            _ENTRY_BYTES
            + _EFFECT_BYTES * len(self.items)
            + _EXTRA_BYTES * len(self.extras)
            + _REFUSED_BYTES * len(self.refused)
            + _EVICTED_BYTES * len(self.evicted_blocks)
            + len(self.blocks)
            + texts
        )

    def refusal(self, position: int) -> RefusedItem | None:
        """Return the refused item of the event at `position`, None if the event is an effect."""
        return RefusedItem(*self.refused[position - len(self.items)]) if position >= len(self.items) else None  # type: ignore[arg-type]

    def item(self, position: int) -> StepItem:
        """Return the verb of the effect at `position`."""
        return StepItem(self.items[position])

    def kind(self, position: int) -> int:
        """Return the number of the kind of blocks of the event at `position`."""
        return self.kinds[position] if position < len(self.kinds) else 0

    def admission(self, position: int) -> Allocation | None:
        """Return the details of an applied allocate, None for other events."""
        if position >= len(self.items) or self.items[position] != StepItem.ALLOCATE.value:
            return None
        return Allocation(*self.extras[position])  # type: ignore[misc]

    def free_details(self, position: int) -> FreeDetails | None:
        """Return the details of an applied free, None for other events."""
        if position >= len(self.items) or self.items[position] != StepItem.FREE.value:
            return None
        return FreeDetails(*self.extras[position])  # type: ignore[misc]

    def condemn_details(self, position: int) -> CondemnDetails | None:
        """Return the details of an applied condemn, None for other events."""
        if position >= len(self.items) or self.items[position] != StepItem.CONDEMN.value:
            return None
        return CondemnDetails(*self.extras[position])  # type: ignore[misc]

    def child(self, position: int) -> int:
        """Return the child sequence of an applied fork."""
        child = self.extras[position]
        assert isinstance(child, int)
        return child

    def first_block(self, position: int) -> int:
        """Return the first logical block of an applied trim."""
        first = self.extras[position]
        assert isinstance(first, int)
        return first

    def blocks_of(self, position: int) -> Sequence[int]:
        """Return the blocks of the effect at `position`, in their order."""
        start = sum(self.block_counts[:position])
        blocks = array("i")
        blocks.frombytes(self.blocks[start * blocks.itemsize : (start + self.block_counts[position]) * blocks.itemsize])
        return blocks

    def evicted(self, position: int) -> tuple[int, ...]:
        """Return the blocks that were evicted for the effect at `position`."""
        if not self.eviction_counts:
            return ()
        start = sum(self.eviction_counts[:position])
        return self.evicted_blocks[start : start + self.eviction_counts[position]]

    def evictor(self, key: bytes, kind: int = 0) -> int | None:
        """Return the position of the last effect for which a kind's block with a key was evicted, None if none was."""
        at = len(self.evicted_keys)
        while (at := self.evicted_keys.rfind(key, 0, at + KEY_BYTES - 1)) >= 0:
            if at % KEY_BYTES == 0 and self.kind(position := self._position_of_eviction(at // KEY_BYTES)) == kind:
                return position
        return None

    def _position_of_eviction(self, index: int) -> int:
        position = 0
        while index >= self.eviction_counts[position]:
            index -= self.eviction_counts[position]
            position += 1
        return position

    def positions_of_block(self, block: int, *, host: bool, kind: int = 0) -> list[int]:
        """Return the positions of the effects on a block of a kind. Swap_outs and some condemns are of host blocks."""
        return [
            position
            for position in range(len(self.items))
            if self._is_of_host(position) == host
            and self.kind(position) == kind
            and (block in self.blocks_of(position) or (not host and block in self.evicted(position)))
        ]

    def _is_of_host(self, position: int) -> bool:
        condemned = self.condemn_details(position)
        return condemned.host if condemned else self.items[position] == StepItem.SWAP_OUT.value

    def event(self, position: int, engine_id: str, kinds: Sequence[str] = ("",)) -> Event:
        """Return the event at `position` of an engine whose kinds of blocks have these names, that of kind 0 empty."""
        number, kind = self.first + position, kinds[self.kind(position)]
        if self.change:
            ranges = block_ranges(self.blocks_of(0)) if self.blocks else ()
            return Event(number, engine_id, ranges=ranges, change=PoolChange(self.change), kind=kind)
        refused = self.refusal(position)
        if refused:
            return self._refusal_event(number, engine_id, refused)
        return self._effect_event(number, engine_id, position, kind)

    def _effect_event(self, number: int, engine_id: str, position: int, kind: str) -> Event:
        admission, details = self.admission(position), self.free_details(position)
        condemned = self.condemn_details(position)
        return Event(
            number,
            engine_id,
            self.step,
            self.item(position),
            self.sequences[position],
            self.groups[position],
            self.request_ids[position] or "",
            block_ranges(self.blocks_of(position)),
            free_reason=FreeReason(details.reason) if details else None,
            preempted_for_group=details.preempted_for_group if details else 0,
            cached_tokens=admission.cached_tokens if admission else 0,
            waited_seconds=admission.waited_seconds if admission else 0.0,
            evicted=self.evicted(position),
            prefix_of=admission.prefix_of if admission else "",
            kind=kind,
            condemn_reason=CondemnReason(condemned.reason) if condemned else None,
            host=condemned.host if condemned else False,
        )

    def _refusal_event(self, number: int, engine_id: str, refused: RefusedItem) -> Event:
        return Event(
            number,
            engine_id,
            self.step,
            StepItem(refused.item),
            refused.sequence,
            refused.group,
            refused.request_id,
            refusal=StepRefusal(refused.reason),
            detail=refused.detail,
            free_reason=FreeReason(refused.free_reason) if refused.free_reason else None,
            preempted_for_group=refused.preempted_for_group,
            waited_seconds=refused.waited_seconds,
        )


def block_ranges(blocks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the first and last id of each run of consecutive ids, lowest first."""
    ranges: list[tuple[int, int]] = []
    first = last = 0
    for block in sorted(blocks):
        if first and block != last + 1:
            ranges.append((first, last))
        if block != last + 1 or not first:
            first = block
        last = block
    return (*ranges, (first, last)) if first else ()
