"""Attached pools in the ledger, with the requests of their live sequences."""

from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

from blocks import Extend, Free, Refusal, Step, StepItem
from kvmanager.effects import Allocated, Condemned, Effect, Forked, Freed, RawEffect, Trimmed, effect_of
from kvmanager.history.events import Entry, Event, RefusedItem
from kvmanager.pool_state import SequenceTable


class _LiveGroup:
    """A live group with its request and its number of sequences."""

    __slots__ = ("group", "members", "request_id")

    def __init__(self, group: int, request_id: str) -> None:
        self.group = group
        self.request_id = request_id
        self.members = 0


class Attachment:
    """An attached pool until its end, with the requests of its live sequences.

    `adopted` is True if the pool began with sequences. `successor` is the pool that the same engine attached next.
    `kinds` are the names of the kinds of blocks, that of kind 0 empty.
    """

    def __init__(
        self,
        number: int,
        engine_id: str,
        sequences: Iterable[SequenceTable],
        windows: Sequence[str] = (),
        block_size: int = 1,
    ) -> None:
        self.number = number
        self.engine_id = engine_id
        self.block_size = block_size
        self.kinds = ("", *windows)
        self.ended_by = 0  # number of the event that ended it
        self.successor: Attachment | None = None
        self._request_ids: dict[int, str] = {}  # by sequence
        self._groups_by_sequence: dict[int, _LiveGroup] = {}
        self._groups: dict[int, _LiveGroup] = {}
        self._step = 0
        self._ended: dict[int, str] = {}  # requests whose sequences the latest block step freed, for its window kinds
        for sequence in sequences:
            self._add(sequence.id, sequence.group, sequence.request_id)
        self.adopted = bool(self._groups_by_sequence)

    def end(self, event: int, successor: "Attachment | None" = None) -> None:
        """Record the number of the event that ended the pool, and clear its sequences."""
        self.ended_by = event
        self.successor = successor
        self._request_ids.clear()
        self._groups_by_sequence.clear()
        self._groups.clear()

    def holds(self, request_id: str) -> bool:
        """Return whether the request has a live group."""
        return any(live_group.request_id == request_id for live_group in self._groups.values())

    def event(self, entry: Entry, position: int) -> Event:
        """Return an event of one of its entries."""
        return entry.event(position, self.engine_id, self.kinds)

    def entry(
        self,
        first: int,
        step: int,
        effects: Sequence[RawEffect],
        refused: tuple[tuple[object, ...], ...] = (),
        kinds: bytes = b"",
    ) -> Entry:
        """Return the entry of a block step, and update the live sequences.

        `kinds` has the kind of each effect, those of kind 0 first; empty if all are of kind 0.
        """
        if not effects:
            return Entry(first, self.number, step, refused=refused)
        items, sequences, groups, blocks, evicted, others = zip(*effects, strict=True)
        if kinds:
            request_ids, extras = self._follow_kinds(step, effects, kinds)
        elif any(others):
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
            kinds,
        )

    def _follow_kinds(
        self, step: int, effects: Sequence[RawEffect], kinds: bytes
    ) -> tuple[tuple[str | None, ...], tuple[object, ...]]:
        """Follow the effects of kind 0, and give those of window kinds the requests of their sequences."""
        if step != self._step:
            self._step, self._ended = step, {}
        count = kinds.count(0)
        before = dict(self._request_ids)
        request_ids, extras = self._follow(effects[:count])
        self._ended |= {sequence: before[sequence] for sequence in before.keys() - self._request_ids.keys()}
        own = [self._request_ids.get(effect[1]) or self._ended.get(effect[1]) for effect in effects[count:]]
        return (*request_ids, *own), (*extras, *map(_extra_of, map(effect_of, effects[count:])))

    def _follow(self, effects: Sequence[RawEffect]) -> tuple[tuple[str | None, ...], tuple[object, ...]]:
        request_ids: list[str | None] = []
        extras: list[object] = []
        for effect in map(effect_of, effects):
            request_id = self._request_ids.get(effect.sequence)
            match effect:
                case Allocated(sequence_id, group, allocation=allocation):
                    request_id = allocation.request_id
                    self._add(sequence_id, group, request_id)
                case Forked(group=group, child=child):
                    self._add(child, group, request_id or "")
                case Freed():
                    self._remove(effect.sequence)
            request_ids.append(request_id)
            extras.append(_extra_of(effect))
        return tuple(request_ids), tuple(extras)

    def _add(self, sequence_id: int, group: int, request_id: str) -> None:
        live_group = self._groups.get(group) or self._groups.setdefault(group, _LiveGroup(group, request_id))
        live_group.members += 1
        self._groups_by_sequence[sequence_id] = live_group
        self._request_ids[sequence_id] = request_id

    def _remove(self, sequence_id: int) -> None:
        live_group = self._groups_by_sequence.pop(sequence_id, None)
        if live_group is None:
            return
        del self._request_ids[sequence_id]
        live_group.members -= 1
        if not live_group.members:
            del self._groups[live_group.group]

    def refused_item(self, step: Step, refusal: Refusal) -> RefusedItem:
        """Return the record of a refused item."""
        item: object = _LISTS[refusal.item](step)[refusal.position]
        sequence, group = _ids_of(item)
        live_group = self._groups.get(group) if group else self._groups_by_sequence.get(sequence)
        return RefusedItem(
            refusal.item.value,
            sequence,
            live_group.group if live_group else group,
            getattr(item, "request_id", live_group.request_id if live_group else ""),
            refusal.reason.value,
            refusal.detail,
            item.reason.value if isinstance(item, Free) else 0,
            getattr(item, "preempted_for_group", 0),
            getattr(item, "waited_seconds", 0.0),
        )


def _extra_of(effect: Effect) -> object:
    """Return what an entry keeps of an effect beside its blocks."""
    match effect:
        case Condemned():
            return (effect.reason.value, effect.host)
        case Allocated(allocation=allocation):
            return tuple(allocation)
        case Forked(child=child):
            return child
        case Freed():
            return (effect.reason.value, effect.preempted_for_group)
        case Trimmed():
            return effect.first_block
        case _:
            return None


_LISTS = {
    StepItem.CONDEMN: lambda step: step.condemns,
    StepItem.COMMIT: lambda step: step.commits,
    StepItem.TRIM: lambda step: step.trims,
    StepItem.PIN: lambda step: step.pins,
    StepItem.FORK: lambda step: step.forks,
    StepItem.FREE: lambda step: step.frees,
    StepItem.SWAP_OUT: lambda step: step.swap_outs,
    StepItem.SWAP_IN: lambda step: step.swap_ins,
    StepItem.EXTEND: lambda step: step.extends,
    StepItem.ALLOCATE: lambda step: step.allocates,
}


def _ids_of(item: object) -> tuple[int, int]:
    """Return the sequence and the group of an item; 0 if it has none."""
    if isinstance(item, int):  # a swap
        return 0, item
    if isinstance(item, Extend):
        return item.rooms[0][0] if item.rooms else 0, item.group
    sequence = getattr(item, "sequence", 0) or getattr(item, "parent", 0)
    return sequence, getattr(item, "group", 0)
