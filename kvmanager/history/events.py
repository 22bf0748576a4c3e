"""What the ledger keeps of a Step, and the events that are made of it when somebody reads.

No token id is kept, and block keys never leave: of an allocate remain its request and the key that its prefix missed.
"""

from array import array
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import chain
from typing import NamedTuple

from blocks import KEY_BYTES, Extend, Free, FreeReason, Refusal, Step, StepItem, StepRefusal
from kvmanager.effects import Allocated, Allocation, Forked, Freed, RawEffect, effect_of
from kvmanager.pool_state import SequenceTable

# What an entry takes in memory, and what it keeps of an effect: measured, and rounded up. An extra has a request's id.
_ENTRY_BYTES, _EFFECT_BYTES, _EXTRA_BYTES, _REFUSED_BYTES, _EVICTED_BYTES = 400, 90, 300, 280, 76
_REQUEST_ID, _DETAIL = 3, 5  # of Refused


class PoolChange(Enum):
    """What happened to a pool as a whole."""

    ATTACHED = 1  # in the place of an older one of the engine, if there was one
    DETACHED = 2
    WITHHELD = 3  # the audit took device blocks out of circulation
    HOST_WITHHELD = 4


class Event(NamedTuple):
    """One verb that was done or refused, or a `change` of a pool as a whole, which has no step and no item.

    `ranges` are the first and last ids of the blocks concerned: host blocks for a swap_out and for what was withheld
    in the host tier, else device blocks.
    `waited_seconds` is how long the group of an allocate had waited. `evicted` are the keyed blocks whose contents were
    given up for it. `detail` says in words why it was refused.
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
    change: PoolChange | None = None


class End(NamedTuple):
    """What else there is to say of a free: the number of its FreeReason, and whom it was preempted for."""

    reason: int
    preempted_for_group: int


class Refused(NamedTuple):
    """A refused verb. Item, reason and `free_reason` are the numbers of their enums; 0: it was no free."""

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
    """What is kept of a Step, or of a change of a pool as a whole. Its events are numbered from `first` on.

    A hundred thousand events are kept, and the garbage collector must not have to look at each of them: what is one
    value an effect stands in columns, made of nothing but plain tuples, bytes, numbers and strings.
    """

    first: int
    attachment: int
    step: int = 0
    change: int = 0
    items: bytes = b""  # numbers of step items
    sequences: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    request_ids: tuple[str | None, ...] = ()
    block_counts: tuple[int, ...] = ()
    blocks: bytes = b""  # of all effects, as 32-bit numbers
    extras: tuple[object, ...] = ()  # what else there is to say, as plain tuples; empty: nothing
    eviction_counts: tuple[int, ...] = ()  # empty: nothing was evicted
    evicted_blocks: tuple[int, ...] = ()
    evicted_keys: bytes = b""
    refused: tuple[tuple[object, ...], ...] = ()

    @property
    def size(self) -> int:
        """How many events it makes: its effects in their order, then what was refused."""
        return 1 if self.change else len(self.items) + len(self.refused)

    @property
    def weight(self) -> int:
        """About how many bytes it takes, with all that only it keeps."""
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

    def refusal(self, place: int) -> Refused | None:
        """Return the refused verb at a place, None if it was done."""
        return Refused(*self.refused[place - len(self.items)]) if place >= len(self.items) else None  # type: ignore[arg-type]

    def item(self, place: int) -> StepItem:
        """Return which verb was done."""
        return StepItem(self.items[place])

    def admission(self, place: int) -> Allocation | None:
        """Return what there is to say of an allocate that was done, None for others."""
        if place >= len(self.items) or self.items[place] != StepItem.ALLOCATE.value:
            return None
        return Allocation(*self.extras[place])  # type: ignore[misc]

    def end(self, place: int) -> End | None:
        """Return what there is to say of a free that was done, None for others."""
        if place >= len(self.items) or self.items[place] != StepItem.FREE.value:
            return None
        return End(*self.extras[place])  # type: ignore[misc]

    def child(self, place: int) -> int:
        """Return the new sequence of a fork that was done."""
        child = self.extras[place]
        assert isinstance(child, int)
        return child

    def blocks_of(self, place: int) -> Sequence[int]:
        """Return the blocks of what was done, in its order."""
        start = sum(self.block_counts[:place])
        blocks = array("i")
        blocks.frombytes(self.blocks[start * blocks.itemsize : (start + self.block_counts[place]) * blocks.itemsize])
        return blocks

    def evicted(self, place: int) -> tuple[int, ...]:
        """Return the blocks that were evicted for what was done."""
        if not self.eviction_counts:
            return ()
        start = sum(self.eviction_counts[:place])
        return self.evicted_blocks[start : start + self.eviction_counts[place]]

    def evictor(self, key: bytes) -> int | None:
        """Return the place of the verb that a key was evicted for; None: it was not. If several were, the last one."""
        at = self.evicted_keys.rfind(key)
        while at % KEY_BYTES and at >= 0:
            at = self.evicted_keys.rfind(key, 0, at + KEY_BYTES - 1)
        if at < 0:
            return None
        place, left = 0, at // KEY_BYTES
        while left >= self.eviction_counts[place]:
            left -= self.eviction_counts[place]
            place += 1
        return place

    def places_of_block(self, block: int, *, host: bool) -> list[int]:
        """Return the places of what was done to a block, or with it: host blocks are those of a swap_out."""
        return [
            place
            for place, item in enumerate(self.items)
            if (item == StepItem.SWAP_OUT.value) == host
            and (block in self.blocks_of(place) or (not host and block in self.evicted(place)))
        ]

    def event(self, place: int, engine_id: str) -> Event:
        """Make the event at a place."""
        number = self.first + place
        if self.change:
            ranges = block_ranges(self.blocks_of(0)) if self.blocks else ()
            return Event(number, engine_id, ranges=ranges, change=PoolChange(self.change))
        refused = self.refusal(place)
        return self._refused(number, engine_id, refused) if refused else self._done(number, engine_id, place)

    def _done(self, number: int, engine_id: str, place: int) -> Event:
        admission, end = self.admission(place), self.end(place)
        return Event(
            number,
            engine_id,
            self.step,
            self.item(place),
            self.sequences[place],
            self.groups[place],
            self.request_ids[place] or "",
            block_ranges(self.blocks_of(place)),
            free_reason=FreeReason(end.reason) if end else None,
            preempted_for_group=end.preempted_for_group if end else 0,
            cached_tokens=admission.cached_tokens if admission else 0,
            waited_seconds=admission.waited_seconds if admission else 0.0,
            evicted=self.evicted(place),
        )

    def _refused(self, number: int, engine_id: str, refused: Refused) -> Event:
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


class _Owner:
    """A live group, the request that it belongs to, and how many sequences it has."""

    __slots__ = ("group", "members", "request_id")

    def __init__(self, group: int, request_id: str) -> None:
        self.group = group
        self.request_id = request_id
        self.members = 0


class Attachment:
    """A pool from its beginning to its end: whose its sequences are.

    `adopted` says that it began with sequences, `successor` is the pool that the same engine attached next.
    """

    def __init__(self, number: int, engine_id: str, sequences: Iterable[SequenceTable]) -> None:
        self.number = number
        self.engine_id = engine_id
        self.ended_by = 0  # number of the event
        self.successor: Attachment | None = None
        self._request_ids: dict[int, str] = {}  # by sequence
        self._owners: dict[int, _Owner] = {}  # by sequence
        self._groups: dict[int, _Owner] = {}
        for sequence in sequences:
            self._add(sequence.id, sequence.group, sequence.request_id)
        self.adopted = bool(self._owners)

    def end(self, event: int, successor: "Attachment | None" = None) -> None:
        """Forget the sequences: an event ended this pool."""
        self.ended_by = event
        self.successor = successor
        self._request_ids.clear()
        self._owners.clear()
        self._groups.clear()

    def holds(self, request_id: str) -> bool:
        """Return whether any live group is the request's."""
        return any(owner.request_id == request_id for owner in self._groups.values())

    def entry(
        self, first: int, step: int, effects: Sequence[RawEffect], refused: tuple[tuple[object, ...], ...] = ()
    ) -> Entry:
        """Write down what a Step did, following which sequences begin and end with it."""
        if not effects:
            return Entry(first, self.number, step, refused=refused)
        items, sequences, groups, blocks, evicted, others = zip(*effects, strict=True)
        if any(others):
            request_ids, extras = self._follow(effects)
        else:
            request_ids, extras = tuple(map(self._request_ids.get, sequences)), ()
        evictions = list(chain.from_iterable(evicted))
        return Entry(
            first,
            self.number,
            step,
            0,
            bytes([item._value_ for item in items]),
            sequences,
            groups,
            request_ids,
            tuple(map(len, blocks)),
            array("i", blocks[0] if len(blocks) == 1 else chain.from_iterable(blocks)).tobytes(),
            extras,
            tuple(map(len, evicted)) if evictions else (),
            tuple([block for block, _ in evictions]),
            b"".join([key for _, key in evictions]),
            refused,
        )

    def _follow(self, effects: Sequence[RawEffect]) -> tuple[tuple[str | None, ...], tuple[object, ...]]:
        request_ids: list[str | None] = []
        extras: list[object] = []
        for effect in map(effect_of, effects):
            request_id = self._request_ids.get(effect.sequence)
            extra: object = None
            match effect:
                case Allocated(number, group, allocation=allocation):
                    request_id = allocation.request_id
                    self._add(number, group, request_id)
                    extra = tuple(allocation)
                case Forked(group=group, child=child):
                    self._add(child, group, request_id or "")
                    extra = child
                case Freed():
                    self._remove(effect.sequence)
                    extra = (effect.reason.value, effect.preempted_for_group)
            request_ids.append(request_id)
            extras.append(extra)
        return tuple(request_ids), tuple(extras)

    def _add(self, number: int, group: int, request_id: str) -> None:
        owner = self._groups.get(group) or self._groups.setdefault(group, _Owner(group, request_id))
        owner.members += 1
        self._owners[number] = owner
        self._request_ids[number] = request_id

    def _remove(self, number: int) -> None:
        owner = self._owners.pop(number, None)
        if owner is None:
            return
        del self._request_ids[number]
        owner.members -= 1
        if not owner.members:
            del self._groups[owner.group]

    def refused(self, step: Step, refusal: Refusal) -> Refused:
        """Return what is known of a refused item."""
        item: object = _LISTS[refusal.item](step)[refusal.position]
        sequence, group = _concerned(item)
        owner = self._groups.get(group) if group else self._owners.get(sequence)
        return Refused(
            refusal.item.value,
            sequence,
            owner.group if owner else group,
            getattr(item, "request_id", owner.request_id if owner else ""),
            refusal.reason.value,
            refusal.detail,
            item.reason.value if isinstance(item, Free) else 0,
            getattr(item, "preempted_for_group", 0),
            getattr(item, "waited_seconds", 0.0),
        )


_LISTS = {
    StepItem.COMMIT: lambda step: step.commits,
    StepItem.PIN: lambda step: step.pins,
    StepItem.FORK: lambda step: step.forks,
    StepItem.FREE: lambda step: step.frees,
    StepItem.SWAP_OUT: lambda step: step.swap_outs,
    StepItem.SWAP_IN: lambda step: step.swap_ins,
    StepItem.EXTEND: lambda step: step.extends,
    StepItem.ALLOCATE: lambda step: step.allocates,
}


def _concerned(item: object) -> tuple[int, int]:
    """Return the sequence and the group that an item names; 0 where it names none."""
    if isinstance(item, int):  # a swap
        return 0, item
    if isinstance(item, Extend):
        return item.rooms[0][0] if item.rooms else 0, item.group
    sequence = getattr(item, "sequence", 0) or getattr(item, "parent", 0)
    return sequence, getattr(item, "group", 0)
