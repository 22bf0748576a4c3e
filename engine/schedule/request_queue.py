"""Who waits, who runs, and what they hold: the state that the scheduler and what it asks of the block manager share.

Groups are ordered by (priority class, arrival), or by arrival put off by the class, kept through preemption: admission
and resumption take the smallest, preemption takes the largest, and nobody preempts a smaller one.
"""

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

from blocks import FreeReason
from engine.errors import BlockManagerBroken
from engine.schedule.pool_view import PoolView
from engine.schedule.preemption import Preemption
from engine.schedule.prefix_claims import PrefixClaims
from engine.schedule.request import Capacity, Failure, OrderKey
from engine.schedule.sequence_group import Group, Sequence


@dataclass(frozen=True)
class Limits:
    """Bounds of a step and of the queue.

    `token_budget` bounds the tokens fed in one step, `max_sequences` the sequences that hold blocks, `max_waiting` the
    queue. `preemption` is how blocks are taken from a group when others need them. `admission_watermark` is the
    fraction of the pool that an admission leaves free while something runs. With `priority_aging`, in seconds, a
    request of class p is served as if it had come p times as much later, whatever its class; 0: a class waits for those
    before it. An isolated request keeps the others waiting for `isolation_seconds` at most. Raises ValueError, naming
    the field, where they cannot work.
    """

    token_budget: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024
    preemption: Preemption = Preemption.RECOMPUTE
    admission_watermark: float = 0.0
    priority_aging: float = 0.0
    isolation_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget is {self.token_budget}, it must be at least max_sequences, {self.max_sequences}: "
                "each decoding sequence takes one token of every step"
            )


@dataclass
class SchedulerTotals:
    """What has happened since the engine started."""

    steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0  # of requests when they were begun,
    cached_tokens: int = 0  # and those of them found in the cache
    planned: int = 0  # sequences that took part in a step, summed over steps,
    left_out: int = 0  # and those that did not because the block manager's answer was not there
    swapped_tokens: int = 0  # computed tokens that preemptions moved to the host
    failures: dict[Failure, int] = field(default_factory=lambda: dict.fromkeys(Failure, 0))  # of requests


class RequestQueue:
    """The live groups by their states, and the engine's view of the pool."""

    def __init__(self, capacity: Capacity, limits: Limits) -> None:
        """Begin without groups, and with an empty pool."""
        self.capacity = capacity
        self.limits = limits
        self.totals = SchedulerTotals()
        self.mirror = PoolView(capacity.block_size, capacity.device_blocks)
        self.claims = PrefixClaims(capacity.block_size)
        self.waiting: list[Group] = []
        self.running: list[Group] = []
        self.admitting: dict[int, Group] = {}  # those whose first blocks were asked for
        self.by_request: dict[str, Group] = {}
        self.to_free: list[tuple[Sequence, FreeReason]] = []
        self.numbers = count(1)  # of sequences
        self._by_id: dict[int, Sequence] = {}
        self._queued_tokens: dict[Group, int] = {}  # what each that waits has to compute,
        self._all_queued_tokens = 0  # and all of them

    def add(self, group: Group) -> None:
        """Take a new group in, waiting."""
        self.by_request[group.request.request_id] = group
        self.know(group.members)
        self.wait(group)

    def know(self, sequences: Iterable[Sequence]) -> None:
        """Take new sequences in."""
        self._by_id.update((sequence.id, sequence) for sequence in sequences)

    def wait(self, group: Group) -> None:
        """Let a group that holds no blocks wait in its place."""
        insort(self.waiting, group, key=_key)
        self._queued_tokens[group] = group.uncomputed_tokens
        self._all_queued_tokens += self._queued_tokens[group]

    def stop_waiting(self, group: Group) -> None:
        """Take a group out of the queue."""
        self.waiting.remove(group)
        self._all_queued_tokens -= self._queued_tokens.pop(group)

    def run(self, group: Group) -> None:
        """Let a group that has its first blocks run in its place."""
        insort(self.running, group, key=_key)

    def sequence(self, number: int) -> Sequence:
        """Return a sequence of these groups. Raises BlockManagerBroken."""
        if number not in self._by_id:
            raise BlockManagerBroken(f"the table of sequence {number} changed, which is not known here")
        return self._by_id[number]

    def find(self, number: int) -> Sequence | None:
        """Return a sequence of these groups, None if it is not one of them any more."""
        return self._by_id.get(number)

    @property
    def watermark(self) -> int:
        """Blocks that an admission leaves free while something runs.

        Rounded down: a block of a tiny pool is a large part of it, and a pool of some hundred has one to spare.
        """
        return int(self.limits.admission_watermark * self.capacity.device_blocks)

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

    def give_back(self, sequences: Iterable[Sequence], reason: FreeReason) -> None:
        """Let the next Step free what sequences hold; forget those that have ended and hold nothing."""
        for sequence in list(sequences):
            if sequence.table and not sequence.leaving:
                sequence.leaving = True
                self.to_free.append((sequence, reason))
            elif not sequence.table:
                self.forget(sequence)

    def freed(self, sequence: Sequence) -> None:
        """A sequence's blocks were given back by the Step that is being made."""
        if sequence.swapped:
            self.mirror.release_host(sequence)
        else:
            self.mirror.release(sequence)
        sequence.lose_blocks()
        self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended and holds nothing."""
        if sequence.finish is not None:
            self._by_id.pop(sequence.id, None)
            if sequence.group.beams and sequence in sequence.group.members:
                sequence.group.members.remove(sequence)


def _key(group: Group) -> OrderKey:
    return group.key
