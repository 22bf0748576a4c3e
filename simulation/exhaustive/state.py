"""A state of the small universe, and what can happen in it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from simulation.exhaustive.held_network import ConnectionName, QueueName
from simulation.network.connections import DeliveryKind

OLDER, NEWER, MANAGER = "the older engine", "the newer engine", "manager"

# A pause of a process, in seconds, which ends without time for the others: of the manager between two slices of work.
PAUSE_SECONDS = 0.002


# Time passes in parts of a second that a float represents exactly, so that differences of times are exact.
_TICKS = 4096


def tick(at: float) -> float:
    """Return the first time, in seconds, at which a timer that is due at this time can be run."""
    return ceil(at * _TICKS) / _TICKS


class Bounds(NamedTuple):
    """How far a search goes: faults on a path, how often time passes, and incarnations of the engine, 1 or 2."""

    faults: int
    timers: int
    incarnations: int = 2


@dataclass(frozen=True, eq=False, slots=True)
class Local:
    """A process in a state: the digest of its structure, and what others need of it.

    `ready`: callbacks of its loop wait. `turn_at` is when its thread can run, and `timer_at` when the next timer of its
    loop is due; None for never. `attached` and `unfinished` are those of an engine. Equal processes are one object.
    """

    digest: bytes
    ready: bool
    turn_at: float | None
    timer_at: float | None
    connections: frozenset[ConnectionName]
    attached: bool = False
    unfinished: tuple[str, ...] = ()

    def wakes_at(self, now: float) -> float | None:
        """Return when a timer of the loop or the pause of the thread, if it has not ended, ends next."""
        if self.turn_at is None or self.turn_at <= now:
            return self.timer_at
        return self.turn_at if self.timer_at is None else min(self.turn_at, self.timer_at)

    def passes_time(self, now: float) -> bool:
        """Return whether time passes until it wakes."""
        wakes_at = self.wakes_at(now)
        return wakes_at is not None and wakes_at > now + PAUSE_SECONDS


class Kind(Enum):
    """What can happen."""

    DELIVER = "receives"
    TURN = "turns"
    CALL_BACK = "runs its callbacks"
    WAKE = "wakes at its next timer"
    START = "starts"
    CUT = "loses a connection"
    KILL = "is killed"
    END = "has ended"  # part of a kill

    __hash__ = object.__hash__  # in C


class Choice(NamedTuple):
    """Something that can happen to a process."""

    kind: Kind
    process: str
    queue: QueueName | None = None
    connection: ConnectionName | None = None


class Cause(NamedTuple):
    """All on which the effect of a choice depends, because processes share nothing but the network and the time."""

    choice: Choice
    local: Local | None
    message: bytes
    broken: frozenset[ConnectionName]
    now: float
    manager: str


class Effect(NamedTuple):
    """What a choice does: the process after it, None if it has ended, and what changes in the network.

    `exit` is why the process has ended by itself.
    """

    local: Local | None
    sent: tuple[tuple[QueueName, bytes], ...]
    broken: frozenset[ConnectionName]
    exit: str | None = None


class Spent(NamedTuple):
    """What has been used of the bounds, and whether the newer engine was started."""

    faults: int = 0
    timers: int = 0
    newer_started: bool = False


Queues = Mapping[QueueName, tuple[bytes, ...]]


class State(NamedTuple):
    """A state: the time in seconds, the processes, and what was sent and has not arrived, as digests in queues.

    `broken` has the connections that are broken and that a process still refers to.
    """

    now: float
    processes: Mapping[str, Local]
    queues: Queues
    broken: frozenset[ConnectionName]
    spent: Spent

    @property
    def manager(self) -> str:
        """The living KV manager; empty before its start."""
        return next((label for label in self.processes if label.startswith(MANAGER)), "")

    def key(self) -> int:
        """Return a hash of the state, 64 bits. Equal states have equal futures."""
        processes, queues = frozenset(self.processes.items()), frozenset(self.queues.items())
        return hash((self.now, processes, queues, self.broken, self.spent))

    def open_connections(self, process: str) -> list[ConnectionName]:
        """Return the connections of a process that are not broken, in order."""
        found = self._referred() - self.broken
        return sorted(name for name in found if process in (name.client, name.server))

    def _referred(self) -> frozenset[ConnectionName]:
        return frozenset().union(*(one.connections for one in self.processes.values()))

    # What can happen.

    def choices(self, bounds: Bounds) -> Iterator[Choice]:
        """Yield all that can happen next within the bounds.

        Time passes where nothing else can happen. If it passes while a message or a process is late, that is a fault.
        """
        progress = tuple(self.progress())
        yield from progress
        may_fail = self.spent.faults < bounds.faults
        if self.spent.timers < bounds.timers and (may_fail or not progress):
            yield from self._time()
        if bounds.incarnations > 1 and not self.spent.newer_started:
            yield Choice(Kind.START, NEWER)
        if may_fail:
            yield from self._faults()

    def progress(self) -> Iterator[Choice]:
        """Yield what can happen without time, faults and new processes."""
        for label, local in self.processes.items():
            yield from _progress_of(label, local, self.now)
        for name in self.queues:
            yield Choice(Kind.DELIVER, name.reader, name)

    def _time(self) -> Iterator[Choice]:
        """Yield the next timers of all. A handler that has read the end of its requests is cancelled before."""
        if all(name.kind is not DeliveryKind.HANDLER_CANCELLED for name in self.queues):
            wakes = {
                label: one.wakes_at(self.now) for label, one in self.processes.items() if one.passes_time(self.now)
            }
            first = min((at for at in wakes.values() if at is not None), default=None)
            yield from (Choice(Kind.WAKE, label) for label, at in wakes.items() if at == first)

    def _faults(self) -> Iterator[Choice]:
        yield from (Choice(Kind.CUT, name.client, connection=name) for name in self.open_connections(self.manager))
        yield from (Choice(Kind.KILL, label) for label in self.processes)

    def parts(self, choice: Choice) -> tuple[Choice, ...]:
        """Return a choice as choices that change one process each. A killed KV manager is started again."""
        if choice.kind is not Kind.KILL:
            return (choice,)
        label = choice.process
        cuts = tuple(Choice(Kind.CUT, name.client, connection=name) for name in self.open_connections(label))
        if label != self.manager:
            return (*cuts, Choice(Kind.END, label))
        number = int(label.removeprefix(MANAGER)) + 1
        return (*cuts, Choice(Kind.END, label), Choice(Kind.START, f"{MANAGER} {number}"))

    # What follows.

    def spend(self, choice: Choice) -> "State":
        """Return the state with what a choice uses of the bounds."""
        spent = self.spent
        if choice.kind in (Kind.CUT, Kind.KILL):
            spent = spent._replace(faults=spent.faults + 1)
        elif choice.kind is Kind.WAKE and self.processes[choice.process].passes_time(self.now):
            late = next(self.progress(), None) is not None
            spent = spent._replace(timers=spent.timers + 1, faults=spent.faults + late)
        elif choice.kind is Kind.START:
            spent = spent._replace(newer_started=True)
        else:
            return self
        return self._replace(spent=spent)

    def cause(self, part: Choice) -> Cause:
        """Return all on which the effect of a part of a choice depends."""
        local = self.processes.get(part.process)
        message = self.queues[part.queue][0] if part.queue is not None else b""
        broken = self.broken & local.connections if local else self.broken
        return Cause(part, local, message, broken, self.now, self.manager)

    def after(self, part: Choice, effect: Effect) -> "State":
        """Return the state after a part of a choice."""
        processes, queues = {**self.processes}, {**self.queues}
        before = processes.pop(part.process, None)
        if effect.local is not None:
            processes[part.process] = effect.local
        if part.queue is not None:
            held = queues.pop(part.queue)
            if len(held) > 1:
                queues[part.queue] = held[1:]
        for name, digest in effect.sent:
            queues[name] = (*queues.get(name, ()), digest)
        state = State(self._time_after(part), processes, queues, self.broken | effect.broken, self.spent)
        is_alike = before and effect.local and before.connections == effect.local.connections
        return state if is_alike and not effect.broken else state.without_lost()

    def _time_after(self, part: Choice) -> float:
        if part.kind is not Kind.WAKE or not (local := self.processes[part.process]).passes_time(self.now):
            return self.now
        return tick(local.wakes_at(self.now) or self.now)

    def without_lost(self) -> "State":
        """Return the state without messages that cannot arrive, and connections to which nothing refers."""
        queues = {
            name: held
            for name, held in self.queues.items()
            if name.reader in self.processes
            and not (name.kind.is_lost_with_connection and name.connection in self.broken)
        }
        return self._replace(queues=queues, broken=self.broken & self._referred())


@lru_cache(maxsize=1 << 16)
def _progress_of(label: str, local: Local, now: float) -> tuple[Choice, ...]:
    found = []
    if local.ready:
        found.append(Choice(Kind.CALL_BACK, label))
    if local.turn_at is not None and local.turn_at <= now:
        found.append(Choice(Kind.TURN, label))
    if local.wakes_at(now) is not None and not local.passes_time(now):
        found.append(Choice(Kind.WAKE, label))
    return tuple(found)
