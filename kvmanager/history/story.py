"""A request's story: its events, and a few plain sentences about what happened to its blocks and why."""

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from heapq import merge
from typing import NamedTuple

from blocks import FreeReason, StepItem, StepRefusal
from kvmanager.errors import UnknownRequest
from kvmanager.history.events import Attachment, Entry, Event, Refused
from kvmanager.pool_spec import shortened
from kvmanager.verbs.admission import Admission

_ENDS = {
    FreeReason.FINISHED: "It finished",
    FreeReason.CANCELLED: "It was cancelled",
    FreeReason.FAILED: "It failed",
    FreeReason.PRUNED: "Its last sequence was pruned",
}


class Explanation(NamedTuple):
    """A request's events, oldest first, and the same in words."""

    events: list[Event]
    summary: str


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
            f"no event of a request {shortened(request_id)!r} is kept, the oldest kept one is number {first}"
        )
    others = _Others(own)
    yield from others.find(entries)
    teller = _Teller(others, attachments)
    events = []
    for mention in merge(own, others.victims, key=lambda mention: mention.number):
        event = mention.entry.event(mention.place, attachments[mention.entry.attachment].engine_id)
        if event.request_id == request_id:
            events.append(event)
            teller.tell(mention, event)
        else:
            teller.tell_victim(event)
        yield
    teller.tell_end(request_id)
    return Explanation(events, " ".join(teller.sentences))


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

    def name(self, attachment: int, group: int) -> str:
        """Return a group in words."""
        request_id = self._names.get((attachment, group))
        return f"request {request_id}" if request_id else f"group {group}"


class _Holdings:
    """Device blocks that a request holds, told by its events.

    Growth is told of one sequence of a group alone: what each of them really has is seen when it gives it back. Where
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


class _Teller:
    """Writes the sentences, hearing of one event after the other."""

    def __init__(self, others: _Others, attachments: Mapping[int, Attachment]) -> None:
        self.sentences: list[str] = []
        self._others = others
        self._attachments = attachments
        self._attachment: Attachment | None = None
        self._holdings = _Holdings()
        self._refused: dict[tuple[StepItem, StepRefusal], list[Event]] = {}
        self._waiting_since: int | None = None  # the step in which it was first refused
        self._admitted = False
        self._preempted = False
        self._swapped = False

    def tell(self, mention: Mention, event: Event) -> None:
        """Hear of an event of the request."""
        attachment = self._attachments[mention.entry.attachment]
        if attachment is not self._attachment:
            self._attachment = attachment
            if not attachment.adopted:
                self._holdings.clear()
        if event.item and event.refusal:
            if event.item is StepItem.ALLOCATE and self._waiting_since is None:
                self._waiting_since = event.step
            self._refused.setdefault((event.item, event.refusal), []).append(event)
        else:
            self._tell_done(mention, event)

    def tell_victim(self, event: Event) -> None:
        """Hear of a request that was preempted for it."""
        self._tell_refusals()
        blocks = _count(sum(last - first + 1 for first, last in event.ranges), "block")
        victim = f"request {event.request_id}" if event.request_id else f"group {event.group}"
        self._say(f"For it {victim} was preempted in step {event.step}, which had {blocks}.")

    def tell_end(self, request_id: str) -> None:
        """Say where all this has led."""
        self._tell_refusals()
        if self._holdings.live:
            self._tell_present(request_id)
        elif self._preempted:
            self._say("It has not been admitted again.")
        elif not self._holdings.most:
            self._say("It has not been admitted.")
        if self._holdings.most:
            self._say(f"It held at most {_count(self._holdings.most, 'block')}.")

    def _say(self, sentence: str) -> None:
        # What happens to a group is told once, not for each of its sequences.
        if sentence not in self.sentences[-1:]:
            self.sentences.append(sentence)

    def _tell_done(self, mention: Mention, event: Event) -> None:
        admission = mention.entry.admission(mention.place)
        if admission:
            self._tell_admission(mention, admission, event)
        elif not self._admitted:
            self._admitted = True
            self._say(f"What came before event {event.number} is no longer kept.")
        self._tell_refusals()
        blocks, engine_id = mention.entry.blocks_of(mention.place), event.engine_id
        match event.item:
            case StepItem.ALLOCATE:
                self._holdings.replace(engine_id, event.sequence, blocks)
            case StepItem.FORK:
                self._holdings.replace(engine_id, event.sequence, blocks)
                self._holdings.replace(engine_id, mention.entry.child(mention.place), blocks)
            case StepItem.FREE:
                self._holdings.end(engine_id, event.sequence, () if self._swapped else blocks)
                self._tell_free(mention, event)
            case StepItem.SWAP_OUT | StepItem.SWAP_IN:
                self._tell_swap(event, blocks)
            case _:
                self._holdings.grow(engine_id, event.sequence, blocks)

    def _tell_admission(self, mention: Mention, admission: Admission, event: Event) -> None:
        self._tell_refusals()
        waits = []
        if self._waiting_since is not None:
            waits.append(f"{_count(event.step - self._waiting_since, 'step')} after it was first refused")
        if event.waited_seconds:
            waits.append(f"after a wait of {event.waited_seconds:.3g} seconds")
        again = " again" if self._admitted else ""
        self._say(", ".join([f"It was admitted{again} by engine {event.engine_id} in step {event.step}", *waits]) + ".")
        self._admitted, self._preempted, self._swapped, self._waiting_since = True, False, False, None
        self._tell_hits(mention, admission)

    def _tell_hits(self, mention: Mention, admission: Admission) -> None:
        found = f"{admission.cached_tokens} of its {_count(admission.prompt_tokens, 'prompt token')} were found"
        if admission.missed is None:
            self._say(f"{found}.")
            return
        evictor = self._others.evictors.get(mention.number)
        cause = (
            f"had been evicted {self._evicted_for(evictor)}" if evictor else "was not there, and no eviction is known"
        )
        self._say(f"{found}: block {admission.hit_blocks + 1} of its prefix {cause}.")

    def _evicted_for(self, evictor: Mention) -> str:
        entry, place = evictor
        request_id = entry.request_ids[place]
        name = f"request {request_id}" if request_id else f"group {entry.groups[place]}"
        return f"in step {entry.step} for the {entry.item(place).name.lower()} of {name}"

    def _tell_free(self, mention: Mention, event: Event) -> None:
        self._preempted = event.free_reason is FreeReason.PREEMPTED
        if self._preempted:
            beneficiary = self._others.name(mention.entry.attachment, event.preempted_for_group)
            self._say(f"It was preempted in step {event.step} for {beneficiary}.")
        elif event.free_reason and not self._holdings.live:
            self._say(f"{_ENDS[event.free_reason]} in step {event.step}.")

    def _tell_swap(self, event: Event, blocks: Sequence[int]) -> None:
        self._swapped = event.item is StepItem.SWAP_OUT
        self._holdings.replace(event.engine_id, event.sequence, () if self._swapped else blocks)
        direction = "out to host memory" if self._swapped else "back in"
        self._say(f"It was swapped {direction} in step {event.step}.")

    def _tell_refusals(self) -> None:
        for (item, reason), events in self._refused.items():
            steps = [event.step for event in events]
            times = f"{len(events)} times in steps {steps[0]} to {steps[-1]}"
            when = f"in step {steps[0]}" if len(events) == 1 else times
            self._say(f"Its {item.name.lower()} was refused as {reason.name.lower()} {when}: {events[-1].detail}.")
        self._refused.clear()

    def _tell_present(self, request_id: str) -> None:
        last = self._attachment
        while last is not None and last.successor is not None:
            last = last.successor
        if last is None or last.ended_by or (last is not self._attachment and not last.holds(request_id)):
            self._say("Its pool was dropped while it held blocks.")
        elif self._swapped:
            self._say("It is swapped out now.")
        else:
            self._say(f"It holds {_count(self._holdings.now, 'block')} now.")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
