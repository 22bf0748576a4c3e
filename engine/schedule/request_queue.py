"""Who waits and who runs, in order.

Groups are ordered by (priority class, arrival), or by arrival put off by the class, kept through preemption: admission
and resumption take the smallest, preemption takes the largest, and nobody preempts a smaller one.
"""

from bisect import insort
from collections.abc import Iterable
from itertools import count

from engine.errors import BlockManagerBroken
from engine.schedule.limits import Limits
from engine.schedule.request import OrderKey
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.stats import SchedulerTotals


class RequestQueue:
    """The live groups by their states: waiting, then admitting while their first blocks are asked for, then running."""

    def __init__(self, limits: Limits) -> None:
        """Begin without groups."""
        self.limits = limits
        self.totals = SchedulerTotals()
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self.admitting: dict[int, Group] = {}
        self.by_request: dict[str, Group] = {}
        self.sequence_ids = count(1)  # of sequences
        self._by_id: dict[int, Sequence] = {}
        self._queued_tokens: dict[Group, int] = {}  # what each that waits has to compute,
        self._all_queued_tokens = 0  # and all of them

    # Lives.

    def add_group(self, group: Group) -> None:
        """Take a new group in, waiting."""
        self.by_request[group.request.request_id] = group
        self.add_sequences(group.members)
        self.add_waiting(group)

    def add_sequences(self, sequences: Iterable[Sequence]) -> None:
        """Take new sequences of live groups in."""
        self._by_id.update((sequence.id, sequence) for sequence in sequences)

    def end(self, group: Group) -> bool:
        """Take out a group that has ended; return whether its blocks can go: if they were asked for, they come yet."""
        del self.by_request[group.request.request_id]
        if group in self.running:
            self.running.remove(group)
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
        """Let a group that holds no device blocks wait in its place."""
        insort(self.waiting, group, key=_key)
        self._queued_tokens[group] = group.uncomputed_tokens
        self._all_queued_tokens += self._queued_tokens[group]

    def start_admission(self, group: Group) -> None:
        """Note that blocks are asked for a group that waits."""
        self._stop_waiting(group)
        self.admitting[group.id] = group

    def finish_admission(self, number: int) -> Group:
        """Return a group whose blocks were asked for, now that there is an answer. It has no state then."""
        return self.admitting.pop(number)

    def add_running(self, group: Group) -> None:
        """Let a group that has its first blocks run in its place."""
        insort(self.running, group, key=_key)

    def preempt(self, group: Group) -> None:
        """Let a group that runs wait: its blocks are taken."""
        self.running.remove(group)
        self.add_waiting(group)

    def resume(self, group: Group) -> None:
        """Let a group that was preempted run, unless it has ended: it has its blocks still."""
        if group in self.waiting:
            self._stop_waiting(group)
            self.add_running(group)

    def _stop_waiting(self, group: Group) -> None:
        self.waiting.remove(group)
        self._all_queued_tokens -= self._queued_tokens.pop(group)

    # What is there.

    def sequence(self, number: int) -> Sequence:
        """Return a sequence of these groups. Raises BlockManagerBroken."""
        if number not in self._by_id:
            raise BlockManagerBroken(f"the table of sequence {number} changed, which is not known here")
        return self._by_id[number]

    def find(self, number: int) -> Sequence | None:
        """Return a sequence of these groups, None if it is not one of them any more."""
        return self._by_id.get(number)

    @property
    def running_sequences(self) -> int:
        """Sequences that hold blocks, or will once they are forked."""
        return sum(group.width for group in self.running)

    @property
    def holds_isolated(self) -> bool:
        """Whether an isolated group has blocks, or will with the answer under way."""
        return any(group.isolated for group in (*self.running, *self.admitting.values()))

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens that live groups have to compute before they decode; of the queue, as they were when they came there.

        It looks at each group that runs, and at none that waits.
        """
        busy = (*self.running, *self.admitting.values())
        return self._all_queued_tokens + sum(group.uncomputed_tokens for group in busy)


def _key(group: Group) -> OrderKey:
    return group.key
