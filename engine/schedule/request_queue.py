"""Waiting and running groups, in order.

Groups are ordered by (priority, arrival), or by arrival plus an offset for the priority. The order is kept through
preemption. The smallest is admitted and resumed first, the largest is preempted first, and no group preempts a smaller
one.
"""

from bisect import insort
from collections.abc import Iterable
from itertools import count

from engine.errors import BlockManagerBroken
from engine.schedule.limits import Limits
from engine.schedule.request import OrderKey
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.stats import SchedulerTotals
from engine.schedule.step_plan import PENDING_TOKEN, StepPlan


class RequestQueue:
    """The live groups by state: waiting, admitting (their first allocation is in flight), running."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.totals = SchedulerTotals()
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self._running: set[Group] = set()
        self.admitting: dict[int, Group] = {}
        self.by_request: dict[str, Group] = {}
        self.sequence_ids = count(1)
        self._isolated = 0  # live requests that are or were isolated,
        self._prefills = 0  # and those that only prefill
        self._by_id: dict[int, Sequence] = {}
        self._queued_tokens: dict[Group, int] = {}  # uncomputed tokens of each waiting group,
        self._all_queued_tokens = 0  # and their sum

    # Groups and sequences.

    def add_group(self, group: Group) -> None:
        """Add a new group, waiting."""
        self._isolated += group.request.isolated
        self._prefills += group.request.prefill_only
        self.by_request[group.request.request_id] = group
        self.add_sequences(group.members)
        self.add_waiting(group)

    def add_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Add new sequences of live groups."""
        self._by_id.update((sequence.id, sequence) for sequence in sequences)

    def end(self, group: Group) -> bool:
        """Remove an ended group; return whether its blocks can be released now.

        If the group is admitting, its allocation is in flight.
        """
        del self.by_request[group.request.request_id]
        self._isolated -= group.request.isolated
        self._prefills -= group.request.prefill_only
        if group in self._running:
            self._stop_running(group)
        elif group in self.waiting:
            self._stop_waiting(group)
        return group.id not in self.admitting

    def remove_sequence(self, sequence: Sequence) -> None:
        """Forget a sequence that holds nothing, if it has ended."""
        if sequence.finish is not None:
            self._by_id.pop(sequence.id, None)
            sequence.group.drop_sequence(sequence)

    # States.

    def add_waiting(self, group: Group) -> None:
        """Insert a group without device blocks into the waiting list."""
        insort(self.waiting, group, key=_key)
        self._queued_tokens[group] = group.uncomputed_tokens
        self._all_queued_tokens += self._queued_tokens[group]

    def start_admission(self, group: Group) -> None:
        """Move a waiting group to admitting: its first allocation is in flight."""
        self._stop_waiting(group)
        self.admitting[group.id] = group

    def finish_admission(self, number: int) -> Group:
        """Remove and return an admitting group whose allocation was answered. The caller decides its next state."""
        return self.admitting.pop(number)

    def add_running(self, group: Group) -> None:
        """Insert a group with its first blocks into the running list."""
        insort(self.running, group, key=_key)
        self._running.add(group)

    def preempt(self, group: Group) -> None:
        """Move a running group to waiting: its blocks are taken."""
        self._stop_running(group)
        self.add_waiting(group)

    def resume(self, group: Group) -> None:
        """Move a preempted group that still has its blocks back to running, unless it has ended."""
        if group in self.waiting:
            self._stop_waiting(group)
            self.add_running(group)

    def _stop_running(self, group: Group) -> None:
        self.running.remove(group)
        self._running.remove(group)

    def _stop_waiting(self, group: Group) -> None:
        self.waiting.remove(group)
        self._all_queued_tokens -= self._queued_tokens.pop(group)

    def count_step(self, plan: StepPlan, now: float) -> StepPlan:
        """Count a planned step, and return it."""
        self.totals.count_step(plan.step, len(plan.work))
        for work in plan.work:
            if work.token_ids is not PENDING_TOKEN:  # else it takes part in the step before, too
                stats = self.sequence(work.sequence).group.stats
                if stats.scheduled_at is None:
                    stats.schedule(now)
        return plan

    # Lookups.

    def sequence(self, number: int) -> Sequence:
        """Return a live sequence. Raises BlockManagerBroken if there is none."""
        if number not in self._by_id:
            raise BlockManagerBroken(f"the block manager changed the table of sequence {number}, which is not live")
        return self._by_id[number]

    def find(self, number: int) -> Sequence | None:
        """Return a live sequence, or None."""
        return self._by_id.get(number)

    def runs(self, group: Group) -> bool:
        """Return whether a group has blocks."""
        return group in self._running

    @property
    def running_sequences(self) -> int:
        """Number of sequences that hold blocks, including those not forked yet."""
        return sum(group.width for group in self.running)

    @property
    def holds_isolated(self) -> bool:
        """Whether an isolated group has blocks, or its allocation is in flight."""
        if not self._isolated:
            return False
        return any(group.isolated for group in (*self.running, *self.admitting.values()))

    @property
    def prefills(self) -> list[Group]:
        """The running groups that only prefill."""
        return [group for group in self.running if group.request.prefill_only] if self._prefills else []

    @property
    def uncomputed_tokens(self) -> int:
        """Number of tokens that live groups must compute before they decode.

        Counts of waiting groups are those at the time they were queued, so that the cost grows only with running
        groups.
        """
        found = self._all_queued_tokens
        for group in self.running:
            members = group.members
            if len(members) == 1 and group.forked:  # as below, without a call: nearly all groups, after every step
                behind = len(members[0].tokens) - 1 - members[0].computed
                found += behind if behind > 0 else 0
            else:
                found += group.uncomputed_tokens
        return found + sum(group.uncomputed_tokens for group in self.admitting.values())


def _key(group: Group) -> OrderKey:
    return group.key
