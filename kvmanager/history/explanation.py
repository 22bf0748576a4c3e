"""The explanation of a request: its events, and the findings about its blocks that follow from them."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from enum import Enum
from heapq import merge
from typing import NamedTuple

from blocks import FreeReason, StepItem, StepRefusal
from kvmanager.effects import Allocation
from kvmanager.errors import UnknownRequest
from kvmanager.history.attachment import Attachment
from kvmanager.history.events import Entry, Event, RefusedItem
from kvmanager.history.held_blocks import HeldBlocks
from kvmanager.pool_spec import truncated


class StateChange(NamedTuple):
    """An end, a preemption or a swap of the request.

    `preempted_for` is a request id, empty if unknown, and `swapped_since` the step of the swap-out that a swap-in ends.
    """

    event: Event
    preempted_for: str = ""
    swapped_since: int | None = None


class Victim(NamedTuple):
    """The preemption of another request for this one."""

    event: Event


class Refusals(NamedTuple):
    """Refusals of one verb for one reason, in order."""

    events: tuple[Event, ...]


class Admitted(NamedTuple):
    """An applied allocate.

    `refused_since` is the step of its first refusal. `evictor` is the event that evicted the key that it missed, and
    `missed_kind` the name of the key's kind, empty for kind 0.
    """

    event: Event
    again: bool
    refused_since: int | None
    admission: Allocation
    evictor: Event | None
    missed_kind: str = ""


class LeftWindow(NamedTuple):
    """Tokens that left the window of a kind, between two admissions of the request.

    `steps` and `tokens` are the first and the last ones. `entries` counts table entries of all `sequences`.
    """

    kind: str
    steps: tuple[int, int]
    tokens: tuple[int, int]
    entries: int
    sequences: int


class CondemnedBlocks(NamedTuple):
    """Blocks whose contents the request found wrong."""

    event: Event


class HistoryTruncated(NamedTuple):
    """The ledger no longer has the request's events before this one."""

    event: Event


Finding = StateChange | Victim | Refusals | Admitted | LeftWindow | CondemnedBlocks | HistoryTruncated


class RequestStatus(Enum):
    """The present state of a request."""

    ENDED = 1
    NEVER_ADMITTED = 2
    NOT_ADMITTED_AGAIN = 3
    POOL_DROPPED = 4
    SWAPPED_OUT = 5
    HOLDS_BLOCKS = 6


class HeldInWindow(NamedTuple):
    """The device blocks of a window kind that a request holds now, and the most that it held at any time."""

    kind: str
    blocks: int
    max_blocks: int


class Explanation(NamedTuple):
    """A request's events, oldest first, and the findings that follow from them.

    `blocks` counts the device blocks of kind 0 that the request holds now, `max_blocks` the most that it held at any
    time. `windows` has both for each window kind.
    """

    events: list[Event]
    findings: list[Finding]
    status: RequestStatus
    blocks: int
    max_blocks: int
    windows: tuple[HeldInWindow, ...] = ()


class EventRef(NamedTuple):
    """A reference to an event in its entry."""

    entry: Entry
    position: int

    @property
    def number(self) -> int:
        """The event's number."""
        return self.entry.first + self.position

    @property
    def group(self) -> int:
        """The group of the event."""
        refused = self.entry.refusal(self.position)
        return refused.group if refused else self.entry.groups[self.position]

    def event(self, attachments: Mapping[int, Attachment]) -> Event:
        """Return the event."""
        return attachments[self.entry.attachment].event(self.entry, self.position)


_Slices = Generator[None, None, None]
_Group = tuple[int, int]  # attachment and group


def explain(
    entries: Sequence[tuple[object, ...]], first: int, attachments: Mapping[int, Attachment], request_id: str
) -> Generator[None, None, Explanation]:
    """Explain a request from the events of `entries` from number `first` on, pausing after each entry and event.

    The generator's return value is the explanation. Raises UnknownRequest.
    """
    own: list[EventRef] = []
    yield from _find_own(entries, first, request_id, own)
    if not own or not request_id:
        raise UnknownRequest(_no_event_of(request_id, first))
    related = _RelatedRequests(own)
    yield from related.find(entries)
    builder = _ExplanationBuilder(related, attachments)
    events = []
    for ref in merge(own, related.victims, key=lambda ref: ref.number):
        event = ref.event(attachments)
        if event.request_id == request_id:
            events.append(event)
            builder.add(ref, event)
        else:
            builder.add_victim(event)
        yield
    return builder.explanation(events, request_id)


def _find_own(entries: Iterable[tuple[object, ...]], first: int, request_id: str, own: list[EventRef]) -> _Slices:
    for entry in map(Entry._make, entries):
        if request_id in entry.request_ids or entry.refused:
            request_ids = [*entry.request_ids, *(RefusedItem._make(plain).request_id for plain in entry.refused)]
            own += [
                EventRef(entry, position)
                for position, one in enumerate(request_ids)
                if one == request_id and entry.first + position >= first
            ]
        yield


def _no_event_of(request_id: str, first: int) -> str:
    kept = f"number {first}, the oldest that is kept" if first > 1 else "this KV manager"
    return (
        f"the ledger has no event of request {truncated(request_id)!r}: it does not exist, still waits for its turn, "
        f"ended before that, or its events are older than {kept}"
    )


class _RelatedRequests:
    """Finds the victims of a request, the evictors of its prefix, and the requests for which it was preempted."""

    def __init__(self, own: list[EventRef]) -> None:
        self.victims: list[EventRef] = []
        self.evictors: dict[int, EventRef] = {}  # by the number of the allocate that missed the evicted key
        self._span = range(own[0].entry.first, own[-1].number + 1)
        # Attachment, key and its kind, by the number of the allocate.
        self._missed: dict[int, tuple[int, bytes, int]] = {}
        self._groups: set[_Group] = set()
        self._preempted_for: set[_Group] = set()
        self._request_ids: dict[_Group, str] = {}
        for ref in own:
            self._add(ref)

    def _add(self, ref: EventRef) -> None:
        entry, position = ref
        self._groups.add((entry.attachment, ref.group))
        admission, details = entry.admission(position), entry.free_details(position)
        if admission and admission.missed is not None and not entry.kind(position):
            self._missed[ref.number] = (entry.attachment, admission.missed, admission.missed_kind)
        if details:
            self._preempted_for.add((entry.attachment, details.preempted_for_group))

    def find(self, entries: Iterable[tuple[object, ...]]) -> _Slices:
        """Search all entries, pausing after each."""
        for entry in map(Entry._make, entries):
            if StepItem.FREE.value in entry.items and entry.first in self._span:
                self._note_victims(entry)
            if entry.evicted_keys:
                self._note_evictions(entry)
            if any(attachment == entry.attachment for attachment, _ in self._preempted_for):
                self._note_request_ids(entry)
            yield

    def _note_victims(self, entry: Entry) -> None:
        for position, group in enumerate(entry.groups):
            details = entry.free_details(position)
            served = (entry.attachment, details.preempted_for_group) if details and not entry.kind(position) else None
            if served in self._groups and (entry.attachment, group) not in self._groups:
                self.victims.append(EventRef(entry, position))

    def _note_evictions(self, entry: Entry) -> None:
        for admission, (attachment, key, kind) in self._missed.items():
            if attachment == entry.attachment and entry.first <= admission:
                position = entry.evictor(key, kind)
                if position is not None and entry.first + position < admission:
                    self.evictors[admission] = EventRef(entry, position)

    def _note_request_ids(self, entry: Entry) -> None:
        for group, request_id in zip(entry.groups, entry.request_ids, strict=True):
            if request_id and (entry.attachment, group) in self._preempted_for:
                self._request_ids[entry.attachment, group] = request_id

    def request_of(self, attachment: int, group: int) -> str:
        """Return the request id of a group for which the request was preempted, empty if unknown."""
        return self._request_ids.get((attachment, group), "")


class _ExplanationBuilder:
    """Collects findings from the events of a request in order."""

    def __init__(self, related: _RelatedRequests, attachments: Mapping[int, Attachment]) -> None:
        self._findings: list[Finding] = []
        self._related = related
        self._attachments = attachments
        self._attachment: Attachment | None = None
        self._held = HeldBlocks()
        self._held_in_windows: dict[str, HeldBlocks] = {}  # by kind
        self._refused: dict[tuple[StepItem, StepRefusal], list[Event]] = {}
        self._refused_since: int | None = None
        self._admitted = False
        self._preempted = False
        self._swapped = False
        self._swapped_since: int | None = None
        self._trimmed: dict[str, list[EventRef]] = {}  # by kind, since the latest admission

    def add(self, ref: EventRef, event: Event) -> None:
        """Add the next event of the request."""
        attachment = self._attachments[ref.entry.attachment]
        if attachment is not self._attachment:
            self._attachment = attachment
            if not attachment.adopted:
                for held in (self._held, *self._held_in_windows.values()):
                    held.clear()
        if event.condemn_reason:
            self._close_refusals()
            self._findings.append(CondemnedBlocks(event))
        elif event.kind:
            if event.item is StepItem.TRIM:
                self._trimmed.setdefault(event.kind, []).append(ref)
            self._hold(self._held_in_windows.setdefault(event.kind, HeldBlocks()), ref, event)
        elif event.item and event.refusal:
            if event.item is StepItem.ALLOCATE and self._refused_since is None:
                self._refused_since = event.step
            self._refused.setdefault((event.item, event.refusal), []).append(event)
        else:
            self._add_effect(ref, event)

    def add_victim(self, event: Event) -> None:
        """Add the preemption of another request for this one."""
        self._close_refusals()
        self._findings.append(Victim(event))

    def explanation(self, events: list[Event], request_id: str) -> Explanation:
        """Return the explanation after the last event."""
        self._close_refusals()
        self._close_trims()
        windows = [HeldInWindow(kind, held.now, held.max_blocks) for kind, held in self._held_in_windows.items()]
        held = self._held
        return Explanation(events, self._findings, self._status(request_id), held.now, held.max_blocks, tuple(windows))

    def _add_effect(self, ref: EventRef, event: Event) -> None:
        admission = ref.entry.admission(ref.position)
        if admission:
            self._close_refusals()
            self._close_trims()  # an admission begins with a new table
            evictor = self._related.evictors.get(ref.number)
            evicting = evictor.event(self._attachments) if evictor else None
            kind = self._attachments[ref.entry.attachment].kinds[admission.missed_kind]
            self._findings.append(Admitted(event, self._admitted, self._refused_since, admission, evicting, kind))
            self._admitted, self._preempted, self._swapped, self._refused_since = True, False, False, None
        elif not self._admitted:
            self._admitted = True
            self._findings.append(HistoryTruncated(event))
        self._close_refusals()
        self._hold(self._held, ref, event)
        if event.item is StepItem.FREE:
            self._add_free(ref, event)
        elif event.item in (StepItem.SWAP_OUT, StepItem.SWAP_IN):
            self._add_swap(event)

    def _hold(self, held: HeldBlocks, ref: EventRef, event: Event) -> None:
        """Follow what an event changes of the held blocks of its kind."""
        blocks, engine_id = ref.entry.blocks_of(ref.position), event.engine_id
        match event.item:
            case StepItem.ALLOCATE | StepItem.SWAP_IN:
                held.replace(engine_id, event.sequence, blocks)
            case StepItem.SWAP_OUT:
                held.replace(engine_id, event.sequence, ())
            case StepItem.FORK:
                held.replace(engine_id, event.sequence, blocks)
                held.replace(engine_id, ref.entry.child(ref.position), blocks)
            case StepItem.TRIM:
                held.shrink(engine_id, event.sequence, blocks)
            case StepItem.FREE:
                held.end(engine_id, event.sequence, () if self._swapped else blocks)
            case _:
                held.grow(engine_id, event.sequence, blocks)

    def _add_swap(self, event: Event) -> None:
        self._swapped = event.item is StepItem.SWAP_OUT
        since, self._swapped_since = self._swapped_since, event.step if self._swapped else None
        self._findings.append(StateChange(event, swapped_since=since))

    def _add_free(self, ref: EventRef, event: Event) -> None:
        self._preempted = event.free_reason is FreeReason.PREEMPTED
        if self._preempted:
            served = self._related.request_of(ref.entry.attachment, event.preempted_for_group)
            self._findings.append(StateChange(event, served))
        elif event.free_reason and not self._held.live:
            self._findings.append(StateChange(event))

    def _close_refusals(self) -> None:
        self._findings += [Refusals(tuple(events)) for events in self._refused.values()]
        self._refused.clear()

    def _close_trims(self) -> None:
        self._findings += [_left_window(self._attachments, kind, refs) for kind, refs in self._trimmed.items()]
        self._trimmed.clear()

    def _status(self, request_id: str) -> RequestStatus:
        if self._held.live:
            return self._live_status(request_id)
        if self._preempted:
            return RequestStatus.NOT_ADMITTED_AGAIN
        return RequestStatus.ENDED if self._held.max_blocks else RequestStatus.NEVER_ADMITTED

    def _live_status(self, request_id: str) -> RequestStatus:
        last = self._attachment
        while last is not None and last.successor is not None:
            last = last.successor
        if last is None or last.ended_by or (last is not self._attachment and not last.holds(request_id)):
            return RequestStatus.POOL_DROPPED
        return RequestStatus.SWAPPED_OUT if self._swapped else RequestStatus.HOLDS_BLOCKS


def _left_window(attachments: Mapping[int, Attachment], kind: str, trims: Sequence[EventRef]) -> LeftWindow:
    """Merge the trims of a kind, of which there may be thousands."""
    size = attachments[trims[0].entry.attachment].block_size
    spans = [(entry.first_block(at), len(entry.blocks_of(at))) for entry, at in trims]
    return LeftWindow(
        kind,
        (trims[0].entry.step, trims[-1].entry.step),
        (min(first for first, _ in spans) * size, max(map(sum, spans)) * size - 1),
        sum(count for _, count in spans),
        len({entry.sequences[at] for entry, at in trims}),
    )
