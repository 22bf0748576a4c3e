"""The ledger: what every verb did, in the order of its doing, for as long as there is room.

Recording is on every engine's path and keeps references, no more. They are put into their lasting form between Steps,
and events are made when somebody reads.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import islice
from operator import itemgetter
from typing import NamedTuple, TypeVar

from blocks import Step, StepItem
from kvmanager.applied import AppliedStep
from kvmanager.effects import RawEffect
from kvmanager.history.events import Attachment, Entry, Event, PoolChange
from kvmanager.history.explanation import Explanation, explain
from kvmanager.parts import complete
from kvmanager.pool_state import SequenceTable

# Steps that wait for `settle` at most: together they take less than a millisecond.
_UNFLUSHED_STEPS = 32

# Events, and blocks in them, that are recorded without a pause.
_EVENTS_TOGETHER = 256
_BLOCKS_TOGETHER = 16384

_first = itemgetter(0)
_Item = TypeVar("_Item")


class Page(NamedTuple):
    """Consecutive events, made one by one, and the number of the first of them, or of the next one while there is none.

    A reader that wanted an older one missed some.
    """

    first: int
    events: Iterator[Event]


class Ledger:
    """The latest events of all engines, numbered from 1 without gaps over the ledger's life.

    An event is a verb that was done or refused, or a change of a pool as a whole. Within a Step those that were done
    come first. Lengths are no verbs.
    """

    def __init__(self, events: int = 100_000, weight: int = 32 << 20) -> None:
        """Keep so many events, or fewer where they weigh more than so many bytes: long tables cost memory."""
        self._most_events = events
        self._most_weight = weight
        # Plain tuples, which the garbage collector soon leaves alone; an Entry is made of one that is read.
        self._entries: deque[tuple[object, ...]] = deque()
        self._weights: deque[int] = deque()
        self._weight = 0
        self._next = 1
        self._unflushed: list[tuple[Attachment, int, Sequence[RawEffect]]] = []
        self._attached: dict[str, Attachment] = {}
        self._attachments: dict[int, Attachment] = {}  # by their numbers, while any of their entries may be kept

    @property
    def next_number(self) -> int:
        """The number of the event that will be recorded next."""
        self.flush()
        return self._next

    @property
    def first_kept(self) -> int:
        """The number of the oldest event that is kept, the next number while none is."""
        self.flush()
        return self._first_kept()

    def attached(self, engine_id: str, sequences: Iterable[SequenceTable] = ()) -> None:
        """Record that an engine's pool began, with these sequences, in the place of an older one of the engine."""
        self.flush()
        self._forget_ended()
        attachment = Attachment(self._next, engine_id, sequences)
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

    def withheld(self, engine_id: str, blocks: Iterable[int], *, host: bool) -> None:
        """Record that the audit took blocks of an attached engine's pool out of circulation."""
        self.flush()
        change = PoolChange.HOST_WITHHELD if host else PoolChange.WITHHELD
        ids = array("i", blocks)
        entry = Entry(self._next, self._attached[engine_id].number, change=change.value)
        self._append(entry._replace(block_counts=(len(ids),), blocks=ids.tobytes()))

    def record(self, engine_id: str, step: Step, applied: AppliedStep) -> None:
        """Record what an attached engine's Step did. Keeps its effects, which must not change any more."""
        for _ in self.recording(engine_id, step, applied):
            pass

    def recording(self, engine_id: str, step: Step, applied: AppliedStep) -> Iterator[None]:
        """Record a Step as `record` does, pausing after so many events; the engine has to stay attached meanwhile."""
        attachment = self._attached[engine_id]
        if applied.result.refusals or len(applied.effects) > _EVENTS_TOGETHER:
            yield from self._recording(attachment, step, applied)
        elif applied.effects:
            self._unflushed.append((attachment, step.step, applied.effects))
            if len(self._unflushed) > _UNFLUSHED_STEPS:
                self.flush()

    def _recording(self, attachment: Attachment, step: Step, applied: AppliedStep) -> Iterator[None]:
        self.flush()
        # What was refused speaks of the sequences that there were, and its Step is not kept: it has token ids.
        refused: list[tuple[object, ...]] = []
        for some in _parts([one for one in applied.result.refusals if one.item is not StepItem.LENGTH]):
            refused += [tuple(attachment.refused(step, one)) for one in some]
            if len(some) == _EVENTS_TOGETHER:
                yield
        together = [*_parts_by_blocks(applied.effects)]
        for effects in together[:-1]:
            self._append(attachment.entry(self._next, step.step, effects))
            yield
        some_refused = [*_parts(refused)]
        if together or some_refused:
            first = tuple(some_refused[0]) if some_refused else ()
            self._append(attachment.entry(self._next, step.step, together[-1] if together else (), first))
        for more in some_refused[1:]:
            yield
            self._append(attachment.entry(self._next, step.step, (), tuple(more)))

    def flush(self) -> None:
        """Put what was recorded into its lasting form: some microseconds a Step, best spent after it was answered."""
        for attachment, step, effects in self._unflushed:
            self._append(attachment.entry(self._next, step, effects))
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
        return self._weight > self._most_weight or _first(self._entries[1]) <= self._next - self._most_events

    def _first_kept(self) -> int:
        oldest: int = _first(self._entries[0]) if self._entries else self._next
        return max(oldest, self._next - self._most_events)

    def _forget_ended(self) -> None:
        first = self._first_kept()
        for attachment in list(self._attachments.values()):
            if 0 < attachment.ended_by < first:
                del self._attachments[attachment.number]

    def events(self, from_number: int, most: int) -> Page:
        """Return up to `most` kept events from a number on, oldest first. None is lost while they are being read."""
        first = max(from_number, self.first_kept)
        if first >= self._next:
            return Page(self._next, iter(()))
        position = bisect_right(self._entries, first, key=_first) - 1
        entries = list(islice(self._entries, position, position + most))  # each makes at least one event
        return Page(first, islice(_events(entries, first, dict(self._attachments)), most))

    def explaining(self, request_id: str) -> Generator[None, None, Explanation]:
        """Explain a request in short slices; the generator's return value is the answer.

        It looks at all events that are kept now, whatever is recorded between the slices. Raises UnknownRequest.
        """
        first = self.first_kept
        return explain(list(self._entries), first, dict(self._attachments), request_id)

    def explain(self, request_id: str) -> Explanation:
        """Return a request's events, oldest first, and what follows from them. Raises UnknownRequest."""
        return complete(self.explaining(request_id))

    def block_events(self, engine_id: str, block: int, *, host: bool, most: int) -> Generator[None, None, list[Event]]:
        """Find the latest events of a block, a Step in each slice; the generator's return value lists them in order.

        They are those of the engine's attached pool, at most so many. Of a host block only swap_outs tell.
        """
        self.flush()
        attachment = self._attached.get(engine_id)
        found: list[Event] = []
        for entry in map(Entry._make, reversed(list(self._entries))):
            if attachment is None or entry.first <= attachment.number or len(found) >= most:
                break
            if entry.attachment == attachment.number:
                found += (entry.event(place, engine_id) for place in reversed(entry.places_of_block(block, host=host)))
            yield
        return found[most - 1 :: -1] if found else []


def _parts(events: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    return (events[start : start + _EVENTS_TOGETHER] for start in range(0, len(events), _EVENTS_TOGETHER))


def _parts_by_blocks(effects: Sequence[RawEffect]) -> Iterator[Sequence[RawEffect]]:
    """Yield effects in parts of so many events and, but for a single one, of so many blocks."""
    first = blocks = 0
    for place, effect in enumerate(effects):
        blocks += len(effect[3])
        if place > first and (blocks > _BLOCKS_TOGETHER or place - first == _EVENTS_TOGETHER):
            yield effects[first:place]
            first, blocks = place, len(effect[3])
    if effects:
        yield effects[first:]


def _events(entries: list[tuple[object, ...]], first: int, attachments: dict[int, Attachment]) -> Iterator[Event]:
    for entry in map(Entry._make, entries):
        engine_id = attachments[entry.attachment].engine_id
        for place in range(max(0, first - entry.first), entry.size):
            yield entry.event(place, engine_id)
