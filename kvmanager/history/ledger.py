"""The ledger: the latest events of all pools, in order, within a bound.

Recording is on the path of every block step, so it only keeps references. `flush` converts them to entries between
block steps, and events are made when they are read.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeVar

from blocks import Refusal, Step, StepItem
from kvmanager.applied import AppliedStep
from kvmanager.effects import RawEffect
from kvmanager.history.attachment import Attachment
from kvmanager.history.events import Entry, Event, PoolChange
from kvmanager.history.explanation import Explanation, explain
from kvmanager.parts import complete
from kvmanager.pool_state import SequenceTable

# Maximum of block steps that wait for `flush`: together they take less than a millisecond.
_UNFLUSHED_STEPS = 32

# Events, and blocks in them, that are recorded without a pause.
_PART_EVENTS = 256
_PART_BLOCKS = 16384

_first = itemgetter(0)
_Item = TypeVar("_Item")


class EventPage(NamedTuple):
    """Consecutive events, and the number of the first one, or of the next event if there are none.

    If `first` is higher than the requested number, the events in between are no longer kept.
    """

    first: int
    events: Iterator[Event]


class Ledger:
    """The latest events of all engines, numbered from 1 without gaps.

    An event is an applied or refused verb, or a change of a pool as a whole. Within a block step, the applied verbs
    come first. Lengths are not recorded.
    """

    def __init__(self, events: int = 100_000, weight: int = 32 << 20) -> None:
        """Keep at count `events` events and about `weight` bytes, because entries of long tables are large."""
        self._max_events = events
        self._max_weight = weight
        # Plain tuples, because the garbage collector untracks them; they are converted to Entry on reading.
        self._entries: deque[tuple[object, ...]] = deque()
        self._weights: deque[int] = deque()
        self._weight = 0
        self._next = 1
        self._unflushed: list[tuple[Attachment, int, Sequence[RawEffect], bytes]] = []
        self._attached: dict[str, Attachment] = {}
        self._attachments: dict[int, Attachment] = {}  # by number, while any of their entries may be kept

    @property
    def next_number(self) -> int:
        """The number of the next event."""
        self.flush()
        return self._next

    @property
    def first_kept(self) -> int:
        """The number of the oldest kept event, or the next number if there is none."""
        self.flush()
        return self._first_kept()

    def attached(
        self,
        engine_id: str,
        sequences: Iterable[SequenceTable] = (),
        windows: Sequence[str] = (),
        block_size: int = 1,
    ) -> None:
        """Record that an engine attached a pool with these sequences, which replaces its older pool.

        `windows` are the names of its window kinds.
        """
        self.flush()
        self._drop_ended()
        attachment = Attachment(self._next, engine_id, sequences, windows, block_size)
        replaced = self._attached.get(engine_id)
        if replaced:
            replaced.end(self._next, attachment)
        self._attached[engine_id] = self._attachments[attachment.number] = attachment
        self._append(Entry(self._next, attachment.number, change=PoolChange.ATTACHED.value))

    def detached(self, engine_id: str) -> None:
        """Record that an engine's pool was dropped."""
        self.flush()
        attachment = self._attached.pop(engine_id)
        attachment.end(self._next)
        self._append(Entry(self._next, attachment.number, change=PoolChange.DETACHED.value))

    def withheld(self, engine_id: str, blocks: Iterable[int], *, host: bool, kind: int = 0) -> None:
        """Record that the audit withheld blocks of a kind of an attached engine's pool."""
        self.flush()
        change = PoolChange.HOST_WITHHELD if host else PoolChange.WITHHELD
        ids = array("i", blocks)
        entry = Entry(self._next, self._attached[engine_id].number, change=change.value)
        self._append(entry._replace(block_counts=(len(ids),), blocks=ids.tobytes(), kinds=bytes([kind]) * bool(kind)))

    def record(self, engine_id: str, step: Step, applied: AppliedStep) -> None:
        """Record an attached engine's block step. Keeps its effects, which must not change."""
        for _ in self.recording(engine_id, step, applied):
            pass

    def recording(self, engine_id: str, step: Step, applied: AppliedStep) -> Iterator[None]:
        """Record a block step as `record` does, in slices. The engine must stay attached until the end."""
        attachment = self._attached[engine_id]
        effects, kinds = _with_windows(applied) if applied.windows else (applied.effects, b"")
        if applied.result.refusals or len(effects) > _PART_EVENTS:
            yield from self._recording(attachment, step, applied.result.refusals, effects, kinds)
        elif effects:
            self._unflushed.append((attachment, step.step, effects, kinds))
            if len(self._unflushed) > _UNFLUSHED_STEPS:
                self.flush()

    def _recording(
        self,
        attachment: Attachment,
        step: Step,
        refusals: Iterable[Refusal],
        effects: Sequence[RawEffect],
        kinds: bytes,
    ) -> Iterator[None]:
        self.flush()
        # Refused items are recorded first, because they refer to the sequences before the block step. The block step
        # itself is not kept, because it has token ids.
        refused: list[tuple[object, ...]] = []
        for some in _parts([one for one in refusals if one.item is not StepItem.LENGTH]):
            refused += [tuple(attachment.refused_item(step, one)) for one in some]
            if len(some) == _PART_EVENTS:
                yield
        effect_parts = [*_parts_by_blocks(effects)]
        for some_effects in effect_parts[:-1]:
            some_kinds, kinds = kinds[: len(some_effects)], kinds[len(some_effects) :]
            self._append(attachment.entry(self._next, step.step, some_effects, (), some_kinds))
            yield
        refused_parts = [*_parts(refused)]
        if effect_parts or refused_parts:
            first = tuple(refused_parts[0]) if refused_parts else ()
            last = effect_parts[-1] if effect_parts else ()
            self._append(attachment.entry(self._next, step.step, last, first, kinds))
        for part in refused_parts[1:]:
            yield
            self._append(attachment.entry(self._next, step.step, (), tuple(part)))

    def flush(self) -> None:
        """Convert the recorded block steps to entries: some microseconds each, best spent after its answer is sent."""
        for attachment, step, effects, kinds in self._unflushed:
            self._append(attachment.entry(self._next, step, effects, (), kinds))
        self._unflushed.clear()

    def _append(self, entry: Entry) -> None:
        self._next += entry.size
        self._entries.append(tuple(entry))
        self._weights.append(entry.weight)
        self._weight += self._weights[-1]
        while len(self._entries) > 1 and self._overfull():
            self._entries.popleft()
            self._weight -= self._weights.popleft()

    def _overfull(self) -> bool:
        return self._weight > self._max_weight or _first(self._entries[1]) <= self._next - self._max_events

    def _first_kept(self) -> int:
        oldest: int = _first(self._entries[0]) if self._entries else self._next
        return max(oldest, self._next - self._max_events)

    def _drop_ended(self) -> None:
        first = self._first_kept()
        for attachment in list(self._attachments.values()):
            if 0 < attachment.ended_by < first:
                del self._attachments[attachment.number]

    def events(self, from_number: int, count: int) -> EventPage:
        """Return up to `count` kept events from a number on, oldest first. The page stays valid during recording."""
        first = max(from_number, self.first_kept)
        if first >= self._next:
            return EventPage(self._next, iter(()))
        position = bisect_right(self._entries, first, key=_first) - 1
        entries = list(islice(self._entries, position, position + count))  # each has at least one event
        return EventPage(first, islice(_events(entries, first, dict(self._attachments)), count))

    def explaining(self, request_id: str) -> Generator[None, None, Explanation]:
        """Explain a request in slices; the generator's return value is the explanation.

        It covers the events that are kept now, not those recorded between the slices. Raises UnknownRequest.
        """
        first = self.first_kept
        return explain(list(self._entries), first, dict(self._attachments), request_id)

    def explain(self, request_id: str) -> Explanation:
        """Return the explanation of a request. Raises UnknownRequest."""
        return complete(self.explaining(request_id))

    def block_events(
        self, engine_id: str, block: int, *, host: bool, count: int, kind: int = 0
    ) -> Generator[None, None, list[Event]]:
        """Find the latest `count` events of a block of a kind, an entry in each slice; the return value lists them.

        The oldest event is first.

        Only events of the engine's attached pool are found. For host blocks, only swap_outs and condemns are.
        """
        self.flush()
        attachment = self._attached.get(engine_id)
        found: list[Event] = []
        for entry in map(Entry._make, reversed(list(self._entries))):
            if attachment is None or entry.first <= attachment.number or len(found) >= count:
                break
            if entry.attachment == attachment.number:
                positions = reversed(entry.positions_of_block(block, host=host, kind=kind))
                found += [attachment.event(entry, position) for position in positions]
            yield
        return found[count - 1 :: -1] if found else []


def _with_windows(applied: AppliedStep) -> tuple[list[RawEffect], bytes]:
    """Return the effects of a block step on all kinds of blocks, and the number of each one's kind, kind 0 first.

    Commits are the same in all kinds, so those of kind 0 are enough.
    """
    effects = list(applied.effects)
    kinds = bytearray(len(effects))
    for number, window in enumerate(applied.windows, 1):
        own = [effect for effect in window.effects if effect[0] is not StepItem.COMMIT]
        effects += own
        kinds += bytes([number]) * len(own)
    return effects, bytes(kinds) if any(kinds) else b""


def _parts(events: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    return (events[start : start + _PART_EVENTS] for start in range(0, len(events), _PART_EVENTS))


def _parts_by_blocks(effects: Sequence[RawEffect]) -> Iterator[Sequence[RawEffect]]:
    """Yield effects in parts of at most _PART_EVENTS events and, unless it is a single one, _PART_BLOCKS blocks."""
    first = blocks = 0
    for position, effect in enumerate(effects):
        blocks += len(effect[3])
        if position > first and (blocks > _PART_BLOCKS or position - first == _PART_EVENTS):
            yield effects[first:position]
            first, blocks = position, len(effect[3])
    if effects:
        yield effects[first:]


def _events(entries: list[tuple[object, ...]], first: int, attachments: dict[int, Attachment]) -> Iterator[Event]:
    for entry in map(Entry._make, entries):
        attachment = attachments[entry.attachment]
        for position in range(max(0, first - entry.first), entry.size):
            yield attachment.event(entry, position)
