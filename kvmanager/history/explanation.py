"""The explanation of a request: its events, and what they say together about its blocks and why."""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from enum import Enum
from heapq import merge
from typing import NamedTuple

from blocks import FreeReason, StepItem, StepRefusal
from kvmanager.effects import Allocation
from kvmanager.errors import UnknownRequest
from kvmanager.history.events import Attachment, Entry, Event, Refused
from kvmanager.pool_spec import truncated


class Done(NamedTuple):
    """An end, a preemption or a swap of the request. `served_request` is whom it was preempted for; empty: unknown."""

    event: Event
    served_request: str = ""


class Victim(NamedTuple):
    """The preemption of another request for this one."""

    event: Event


class Refusals(NamedTuple):
    """Refusals of one verb for one reason, in their order."""

    events: tuple[Event, ...]


class Admitted(NamedTuple):
    """An allocate. `refused_since` is the step in which it was first refused; `evictor` evicted the key it missed."""

    event: Event
    again: bool
    refused_since: int | None
    admission: Allocation
    evictor: Event | None


class Forgotten(NamedTuple):
    """The ledger keeps nothing of what came before an event."""

    event: Event


Finding = Done | Victim | Refusals | Admitted | Forgotten


class Standing(Enum):
    """What has become of a request."""

    ENDED = 1
    NEVER_ADMITTED = 2
    NOT_ADMITTED_AGAIN = 3
    POOL_DROPPED = 4
    SWAPPED_OUT = 5
    HOLDS_BLOCKS = 6


class Explanation(NamedTuple):
    """A request's events, oldest first, and what follows from them.

    `blocks` are the device blocks that it holds now, `most_blocks` those that it held at most.
    """

    events: list[Event]
    findings: list[Finding]
    standing: Standing
    blocks: int
    most_blocks: int


class Mention(NamedTuple):
    """An event in its entry, before it is made."""

    entry: Entry
    place: int

    @property
    def number(self) -> int:
        """The event's number."""
        return self.entry.first + self.place

    @property
    def group(self) -> int:
        """The group concerned."""
        refused = self.entry.refusal(self.place)
        return refused.group if refused else self.entry.groups[self.place]

    def event(self, attachments: Mapping[int, Attachment]) -> Event:
        """Make the event."""
        return self.entry.event(self.place, attachments[self.entry.attachment].engine_id)


_Slices = Generator[None, None, None]
_Group = tuple[int, int]  # attachment and group


def explain(
    entries: Sequence[tuple[object, ...]], first: int, attachments: Mapping[int, Attachment], request_id: str
) -> Generator[None, None, Explanation]:
    """Explain a request from entries whose events are kept from number `first` on, pausing after each of them.

    Raises UnknownRequest.
    """
    own: list[Mention] = []
    yield from _find_own(entries, first, request_id, own)
    if not own or not request_id:
        raise UnknownRequest(
            f"no event of a request {truncated(request_id)!r} is kept, the oldest kept one is number {first}"
        )
    others = _Others(own)
    yield from others.find(entries)
    reading = _Reading(others, attachments)
    events = []
    for mention in merge(own, others.victims, key=lambda mention: mention.number):
        event = mention.event(attachments)
        if event.request_id == request_id:
            events.append(event)
            reading.add(mention, event)
        else:
            reading.add_victim(event)
        yield
    return reading.explanation(events, request_id)


def _find_own(entries: Iterable[tuple[object, ...]], first: int, request_id: str, own: list[Mention]) -> _Slices:
    for entry in map(Entry._make, entries):
        if request_id in entry.request_ids or entry.refused:
            whose = [*entry.request_ids, *(Refused._make(plain).request_id for plain in entry.refused)]
            own += [
                Mention(entry, place)
                for place, one in enumerate(whose)
                if one == request_id and entry.first + place >= first
            ]
        yield


class _Others:
    """What other requests had to do with one."""

    def __init__(self, own: list[Mention]) -> None:
        self.victims: list[Mention] = []  # preempted for it
        self.evictors: dict[int, Mention] = {}  # for whom the key was evicted that its allocate of this number missed
        self._span = range(own[0].entry.first, own[-1].number + 1)
        self._missed: dict[int, tuple[int, bytes]] = {}  # attachment and key by allocate
        self._groups: set[_Group] = set()
        self._asked: set[_Group] = set()  # that it was preempted for
        self._names: dict[_Group, str] = {}
        for mention in own:
            self._ask(mention)

    def _ask(self, mention: Mention) -> None:
        entry, place = mention
        self._groups.add((entry.attachment, mention.group))
        admission, end = entry.admission(place), entry.end(place)
        if admission and admission.missed is not None:
            self._missed[mention.number] = (entry.attachment, admission.missed)
        if end:
            self._asked.add((entry.attachment, end.preempted_for_group))

    def find(self, entries: Iterable[tuple[object, ...]]) -> _Slices:
        """Look through all entries once."""
        for entry in map(Entry._make, entries):
            if StepItem.FREE.value in entry.items and entry.first in self._span:
                self._note_victims(entry)
            if entry.evicted_keys:
                self._note_evictions(entry)
            if any(attachment == entry.attachment for attachment, _ in self._asked):
                self._note_names(entry)
            yield

    def _note_victims(self, entry: Entry) -> None:
        for place, group in enumerate(entry.groups):
            end = entry.end(place)
            served = (entry.attachment, end.preempted_for_group) if end else None
            if served in self._groups and (entry.attachment, group) not in self._groups:
                self.victims.append(Mention(entry, place))

    def _note_evictions(self, entry: Entry) -> None:
        for admission, (attachment, key) in self._missed.items():
            if attachment == entry.attachment and entry.first <= admission:
                place = entry.evictor(key)
                if place is not None and entry.first + place < admission:
                    self.evictors[admission] = Mention(entry, place)

    def _note_names(self, entry: Entry) -> None:
        for group, request_id in zip(entry.groups, entry.request_ids, strict=True):
            if request_id and (entry.attachment, group) in self._asked:
                self._names[entry.attachment, group] = request_id

    def request_of(self, attachment: int, group: int) -> str:
        """Return the request of a group that the request was preempted for; empty: unknown."""
        return self._names.get((attachment, group), "")


class _Holdings:
    """Device blocks that a request holds, by its events.

    Growth is recorded of one sequence of a group alone: what each of them has is seen when it gives it back. Where
    one of several got a copy, the block that it was made from is counted too.
    """

    def __init__(self) -> None:
        self.most = 0
        self._tables: dict[tuple[str, int], set[int]] = {}
        self._holders: Counter[tuple[str, int]] = Counter()

    @property
    def now(self) -> int:
        return len(self._holders)

    @property
    def live(self) -> bool:
        """Whether any sequence has a table, be it in the host tier."""
        return bool(self._tables)

    def clear(self) -> None:
        self._tables.clear()
        self._holders.clear()

    def grow(self, engine_id: str, sequence: int, blocks: Iterable[int]) -> None:
        table = self._tables.setdefault((engine_id, sequence), set())
        new = set(blocks) - table
        table |= new
        self._holders.update((engine_id, block) for block in new)
        self.most = max(self.most, self.now)

    def replace(self, engine_id: str, sequence: int, blocks: Iterable[int]) -> None:
        self._drop(engine_id, sequence)
        self.grow(engine_id, sequence, blocks)

    def end(self, engine_id: str, sequence: int, blocks: Iterable[int]) -> None:
        given_back = set(blocks)
        self.most = max(self.most, len(given_back))
        table = self._drop(engine_id, sequence)
        for other in list(self._tables):
            self.replace(*other, self._tables[other] - (given_back - table))
        if self._tables:
            self.grow(*next(iter(self._tables)), table - given_back)

    def _drop(self, engine_id: str, sequence: int) -> set[int]:
        table = self._tables.pop((engine_id, sequence), set())
        for block in table:
            self._holders[engine_id, block] -= 1
            if not self._holders[engine_id, block]:
                del self._holders[engine_id, block]
        return table


class _Reading:
    """Reads one event after the other, and keeps what they say together."""

    def __init__(self, others: _Others, attachments: Mapping[int, Attachment]) -> None:
        self._findings: list[Finding] = []
        self._others = others
        self._attachments = attachments
        self._attachment: Attachment | None = None
        self._holdings = _Holdings()
        self._refused: dict[tuple[StepItem, StepRefusal], list[Event]] = {}
        self._refused_since: int | None = None
        self._admitted = False
        self._preempted = False
        self._swapped = False

    def add(self, mention: Mention, event: Event) -> None:
        """Read the next event of the request."""
        attachment = self._attachments[mention.entry.attachment]
        if attachment is not self._attachment:
            self._attachment = attachment
            if not attachment.adopted:
                self._holdings.clear()
        if event.item and event.refusal:
            if event.item is StepItem.ALLOCATE and self._refused_since is None:
                self._refused_since = event.step
            self._refused.setdefault((event.item, event.refusal), []).append(event)
        else:
            self._add_done(mention, event)

    def add_victim(self, event: Event) -> None:
        """Read the event of a request that was preempted for it."""
        self._end_refusals()
        self._findings.append(Victim(event))

    def explanation(self, events: list[Event], request_id: str) -> Explanation:
        """Return what all events say."""
        self._end_refusals()
        return Explanation(events, self._findings, self._standing(request_id), self._holdings.now, self._holdings.most)

    def _add_done(self, mention: Mention, event: Event) -> None:
        admission = mention.entry.admission(mention.place)
        if admission:
            self._end_refusals()
            evictor = self._others.evictors.get(mention.number)
            evicting = evictor.event(self._attachments) if evictor else None
            self._findings.append(Admitted(event, self._admitted, self._refused_since, admission, evicting))
            self._admitted, self._preempted, self._swapped, self._refused_since = True, False, False, None
        elif not self._admitted:
            self._admitted = True
            self._findings.append(Forgotten(event))
        self._end_refusals()
        self._hold(mention, event)

    def _hold(self, mention: Mention, event: Event) -> None:
        blocks, engine_id = mention.entry.blocks_of(mention.place), event.engine_id
        match event.item:
            case StepItem.ALLOCATE:
                self._holdings.replace(engine_id, event.sequence, blocks)
            case StepItem.FORK:
                self._holdings.replace(engine_id, event.sequence, blocks)
                self._holdings.replace(engine_id, mention.entry.child(mention.place), blocks)
            case StepItem.FREE:
                self._holdings.end(engine_id, event.sequence, () if self._swapped else blocks)
                self._add_free(mention, event)
            case StepItem.SWAP_OUT | StepItem.SWAP_IN:
                self._swapped = event.item is StepItem.SWAP_OUT
                self._holdings.replace(engine_id, event.sequence, () if self._swapped else blocks)
                self._findings.append(Done(event))
            case _:
                self._holdings.grow(engine_id, event.sequence, blocks)

    def _add_free(self, mention: Mention, event: Event) -> None:
        self._preempted = event.free_reason is FreeReason.PREEMPTED
        if self._preempted:
            served = self._others.request_of(mention.entry.attachment, event.preempted_for_group)
            self._findings.append(Done(event, served))
        elif event.free_reason and not self._holdings.live:
            self._findings.append(Done(event))

    def _end_refusals(self) -> None:
        self._findings += [Refusals(tuple(events)) for events in self._refused.values()]
        self._refused.clear()

    def _standing(self, request_id: str) -> Standing:
        if self._holdings.live:
            return self._present(request_id)
        if self._preempted:
            return Standing.NOT_ADMITTED_AGAIN
        return Standing.ENDED if self._holdings.most else Standing.NEVER_ADMITTED

    def _present(self, request_id: str) -> Standing:
        last = self._attachment
        while last is not None and last.successor is not None:
            last = last.successor
        if last is None or last.ended_by or (last is not self._attachment and not last.holds(request_id)):
            return Standing.POOL_DROPPED
        return Standing.SWAPPED_OUT if self._swapped else Standing.HOLDS_BLOCKS
