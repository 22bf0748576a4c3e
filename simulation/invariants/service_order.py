"""What must be true of the order in which an engine serves its requests."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from engine.schedule.request_queue import RequestQueue
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence_group import Group
from simulation.invariants.watched_proof import WatchedProof


class ServiceOrder:
    """Reports turns of an engine that do not keep the order of its requests, to a list.

    * A preempted request is later in the order than all that keep their blocks, unless it held one that was condemned.
    * A request that asks for its first blocks, or for its swapped ones, is earlier than all that wait on, except those
      that wait for another one's prefix or isolation. A short prompt may be later than long ones.
    """

    def __init__(self, scheduler: Scheduler, faults: list[str], proof: WatchedProof | None = None) -> None:
        self._proof = proof
        self._scheduler = scheduler
        self._queue: RequestQueue = scheduler._queue  # which the scheduler shows nobody
        self._faults = faults

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Check a turn, which is made in the context."""
        running, admitting = list(self._queue.running), set(self._queue.admitting)
        tables = {group: [(one.table, *one.window_tables) for one in group.members] for group in running}
        if self._proof is not None:
            self._proof.found.clear()
        yield
        condemned = {(one.kind, one.block) for one in self._proof.found if not one.host} if self._proof else ()
        if condemned:
            running = [group for group in running if not _held(tables[group], condemned)]
        self._faults += self._preemption_faults(running)
        self._faults += self._admission_faults(admitting)

    def _preemption_faults(self, before: list[Group]) -> list[str]:
        queue = self._queue
        kept = [group for group in before if queue.runs(group)]
        if len(kept) == len(before) or not kept:
            return []
        latest = max(kept, key=self._key)
        return [
            f"{_name(one)} was preempted before {_name(latest)}, which is later in the order"
            for one in before
            if one in queue.waiting and self._key(one) < self._key(latest)
        ]

    def _admission_faults(self, before: set[int]) -> list[str]:
        queue = self._queue
        if not queue.waiting or queue.admitting.keys() <= before or self._scheduler.deferred:
            return []
        admitted = [one for number, one in queue.admitting.items() if number not in before]
        return [
            f"{_name(one)} was admitted before {_name(first)}, which is earlier in the order"
            for one in admitted
            for first in queue.waiting
            if not first.isolated and self._key(first) < self._key(one) and not (self._long(first) > self._long(one))
        ]

    def _long(self, group: Group) -> bool:
        threshold = self._queue.limits.long_prefill_token_threshold
        uncached = group.common - self._scheduler._view.claims.cached_tokens(group)
        return 0 < threshold < uncached

    def _key(self, group: Group) -> tuple[float, float, int]:
        request, aging = group.request, self._queue.limits.priority_aging
        if aging:
            return 0, request.arrival + request.priority * aging, group.id
        return request.priority, request.arrival, group.id


def _held(tables: Iterable[tuple[tuple[int, ...], ...]], condemned: Collection[tuple[int, int]]) -> bool:
    return any((kind, block) in condemned for own in tables for kind, table in enumerate(own) for block in table)


def _name(group: Group) -> str:
    return group.request.request_id
