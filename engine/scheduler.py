"""Decides which sequences take part in the next step, and asks the block manager for what the step after needs.

Sequences are ordered by (priority class, arrival), kept through preemption: admission and resumption take the smallest,
preemption takes the largest, and nobody preempts a smaller one. At most one Step is under way, so the count of
available blocks is exact when the next is made: a shortage is foreseen, and the victim's free travels with the needy's
extend.
"""

from bisect import insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from engine.blocks import (
    Allocate,
    Commit,
    Extend,
    Free,
    FreeReason,
    Length,
    Refusal,
    Step,
    StepItem,
    StepResult,
)
from engine.errors import BlockManagerBroken, EngineUnavailable, QueueFull, RequestExists
from engine.mirror import Mirror
from engine.plan import Copies, StepPlan, Work
from engine.prefix_claims import PrefixClaims
from engine.request import Capacity, Failure, FinishReason, OrderKey, Request, Sequence

# Decoding asks this many tokens ahead, so that an answer may take a whole step longer without delaying anybody.
_LOOKAHEAD_TOKENS = 1

_FREE_REASONS = {
    FinishReason.STOP: FreeReason.FINISHED,
    FinishReason.LENGTH: FreeReason.FINISHED,
    FinishReason.CANCELLED: FreeReason.CANCELLED,
    FinishReason.FAILED: FreeReason.FAILED,
}


@dataclass(frozen=True)
class Limits:
    """Bounds of a step and of the queue.

    `token_budget` bounds the tokens fed in one step, `max_sequences` the sequences that hold blocks, `max_waiting` the
    queue. Raises ValueError, naming the field, where they cannot work.
    """

    token_budget: int = 512
    max_sequences: int = 64
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_sequences", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"token_budget is {self.token_budget}, it must be at least max_sequences, {self.max_sequences}: "
                "each decoding sequence takes one token of every step"
            )


class Started(NamedTuple):
    """A request has its first blocks."""

    request_id: str
    cached_tokens: int


class Tokens(NamedTuple):
    """New tokens of a request."""

    request_id: str
    token_ids: list[int]


class Finished(NamedTuple):
    """A request ended; the sequence says how."""

    request_id: str
    sequence: Sequence


Output = Started | Tokens | Finished


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


class Scheduler:
    """The queue, the running sequences, and the engine's copy of their block tables."""

    def __init__(self, capacity: Capacity, limits: Limits) -> None:
        """Begin with an empty queue and an empty pool."""
        self.capacity = capacity
        self.limits = limits
        self.totals = SchedulerTotals()
        self.draining = False
        self._mirror = Mirror(capacity.block_size, capacity.device_blocks)
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_id: dict[int, Sequence] = {}
        self._by_request: dict[str, Sequence] = {}
        self._asked: Step | None = None
        self._admitting: dict[int, Sequence] = {}
        self._to_free: list[tuple[Sequence, FreeReason]] = []
        self._copies: list[Copies] = []
        self._claims = PrefixClaims(capacity.block_size)
        self._refused_at: int | None = None
        self._outputs: list[Output] = []
        self._last_step = 0
        self._last_sequence = 0
        self._now = 0.0  # of the latest plan
        self._extended: Collection[int] = ()  # sequences that the latest Step asked room for

    # What the shell sees.

    @property
    def waiting(self) -> int:
        """Requests without blocks."""
        return len(self._waiting) + len(self._admitting)

    @property
    def running(self) -> int:
        """Requests with blocks."""
        return len(self._running)

    @property
    def asking(self) -> bool:
        """Whether a Step is under way."""
        return self._asked is not None

    @property
    def empty(self) -> bool:
        """Whether no request is live and nothing is left to tell the block manager."""
        return not (self._by_request or self._to_free or self._asked)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises a RequestRefused, and changes nothing, when it cannot be taken."""
        if self.draining:
            raise EngineUnavailable("the engine is draining")
        if request.request_id in self._by_request:
            raise RequestExists(f"request_id {request.request_id!r} is live", "request_id")
        self.capacity.check(request)
        if self.waiting >= self.limits.max_waiting:
            raise QueueFull(f"{self.waiting} requests wait already, which is the limit")
        self._last_sequence += 1
        sequence = Sequence.of(self._last_sequence, request)
        self._by_id[sequence.id] = sequence
        self._by_request[request.request_id] = sequence
        insort(self._waiting, sequence, key=_key)

    def cancel(self, request_id: str) -> None:
        """End a request; an unknown id is ignored. Its blocks go back with the next Step."""
        sequence = self._by_request.get(request_id)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED)

    def undo_asked(self, available_blocks: int) -> None:
        """The Step under way is never answered: its frees and commits hold, but nothing was granted."""
        for sequence in self._admitting.values():
            self._stay_waiting(sequence)
        self._admitting.clear()
        self._asked = self._refused_at = None
        self._mirror.available = available_blocks

    def take_outputs(self) -> list[Output]:
        """Return what is to be told since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # Answers of the block manager.

    def apply(self, result: StepResult) -> None:
        """Take an answer in: tables, refusals, copies, and the count of available blocks."""
        asked = self._asked
        if asked is None or asked.step != result.step:
            raise BlockManagerBroken(f"step {result.step} was answered, {asked and asked.step} was asked")
        self._asked = None
        self._mirror.available = result.available_blocks
        if asked.commits or result.available_blocks != self._refused_at:
            self._refused_at = None
        copies = Copies(tuple(result.device_to_host), tuple(result.host_to_device), tuple(result.copies))
        if any(copies):
            self._copies.append(copies)
        refused = {(refusal.item, refusal.position) for refusal in result.refusals}
        self._check_refusals(result.refusals)
        changes = {change.sequence: change for change in result.tables}
        for change in changes.values():
            self._mirror.change_table(self._known(change.sequence), change)
        for position, allocate in enumerate(asked.allocates):
            sequence = self._admitting.pop(allocate.sequence)
            if (StepItem.ALLOCATE, position) in refused:
                self._stay_waiting(sequence)
            else:
                self._admit(sequence, changes[sequence.id].cached_tokens)

    def _check_refusals(self, refusals: Iterable[Refusal]) -> None:
        for refusal in refusals:
            if refusal.item not in (StepItem.EXTEND, StepItem.ALLOCATE):
                raise BlockManagerBroken(f"{refusal.item.name.lower()} was refused: {refusal.detail}")

    def _known(self, sequence: int) -> Sequence:
        if sequence not in self._by_id:
            raise BlockManagerBroken(f"the table of sequence {sequence} changed, which is not known here")
        return self._by_id[sequence]

    def _stay_waiting(self, sequence: Sequence) -> None:
        self._claims.withdraw(sequence)
        self._refused_at = self._mirror.available
        if sequence.finish is None:
            insort(self._waiting, sequence, key=_key)
        else:
            self._forget(sequence)

    def _admit(self, sequence: Sequence, cached_tokens: int) -> None:
        if sequence.finish is not None:  # cancelled while its blocks were asked for
            self._give_back(sequence, FreeReason.CANCELLED)
            return
        sequence.computed = sequence.told = cached_tokens
        sequence.committed = cached_tokens // self.capacity.block_size
        self._claims.settle(sequence, sequence.committed)
        insort(self._running, sequence, key=_key)
        if not sequence.started:
            sequence.started = True
            sequence.cached_tokens = cached_tokens
            self.totals.prompt_tokens += len(sequence.request.prompt)
            self.totals.cached_tokens += min(cached_tokens, len(sequence.request.prompt))
            self._outputs.append(Started(sequence.request.request_id, cached_tokens))

    # The next step.

    def plan(self, now: float) -> StepPlan | None:
        """Choose the next step's work among sequences whose blocks are there; None when there is nothing to do."""
        self._now = now
        budget = self.limits.token_budget
        decoding = [sequence for sequence in self._running if sequence.remaining == 1]
        prompts = [sequence for sequence in self._running if sequence.remaining > 1]
        work = []
        for sequence in [*decoding, *prompts]:
            count = min(budget, sequence.remaining, sequence.room - sequence.computed)
            if count > 0:
                budget -= count
                work.append(self._work(sequence, count))
                if sequence.scheduled_at is None:
                    sequence.scheduled_at = now
            elif budget > 0:
                self.totals.left_out += self._waits_for_answer(sequence)
        self.totals.planned += len(work)
        if not work and not self._copies:
            return None
        self.totals.steps += 1
        copies, self._copies = tuple(self._copies), []
        return StepPlan(self.totals.steps, copies, tuple(work))

    def _waits_for_answer(self, sequence: Sequence) -> bool:
        """Return whether a sequence has no room because an answer is late, and not because the pool is full."""
        return self._asked is not None and (sequence.id in self._extended or self._mirror.available > 0)

    def _work(self, sequence: Sequence, count: int) -> Work:
        end = sequence.computed + count
        return Work(
            sequence=sequence.id,
            token_ids=tuple(sequence.tokens[sequence.computed : end]),
            start=sequence.computed,
            block_table=tuple(sequence.table[: self._mirror.blocks_for(end)]),
            samples=end == len(sequence.tokens),
            sampling=sequence.request.sampling,
        )

    def publish(self, plan: StepPlan, token_ids: list[int], now: float) -> None:
        """Take in what a step computed: lengths, new tokens, and the requests that end with them."""
        sampled = iter(token_ids)
        for work in plan.work:
            token = next(sampled) if work.samples else None
            sequence = self._by_id[work.sequence]
            self._count_computed(sequence, work)
            if sequence.table:
                sequence.computed = work.end
            else:  # it was preempted while the step ran: the token counts, its K and V are gone
                sequence.lost_tokens = max(sequence.lost_tokens, work.end)
            if token is not None:
                self._take_token(sequence, token, now)

    def _count_computed(self, sequence: Sequence, work: Work) -> None:
        recomputed = max(0, min(work.end, sequence.lost_tokens) - work.start)
        sequence.recomputed_tokens += recomputed
        self.totals.recomputed_tokens += recomputed
        self.totals.computed_tokens += len(work.token_ids)

    def _take_token(self, sequence: Sequence, token: int, now: float) -> None:
        self.totals.generated_tokens += 1
        sequence.append(token)
        if sequence.first_token_at is None:
            sequence.first_token_at = now
        sequence.last_token_at = now
        self._outputs.append(Tokens(sequence.request.request_id, [token]))
        if sequence.finish is not None:
            self._end(sequence, sequence.finish)

    def fail(self, plan: StepPlan, detail: str) -> None:
        """A step was not done: end its requests. What earlier steps computed stays committed and cached."""
        for work in plan.work:
            self._fail(self._by_id[work.sequence], Failure.STEP, detail)

    def fail_all(self, failure: Failure, detail: str) -> None:
        """End every live request as failed."""
        for sequence in list(self._by_request.values()):
            self._fail(sequence, failure, detail)

    def _fail(self, sequence: Sequence, failure: Failure, detail: str) -> None:
        sequence.failure, sequence.detail = failure, detail
        self._end(sequence, FinishReason.FAILED)

    # Block operations for the step after.

    def ask(self, plan: StepPlan | None) -> Step | None:
        """Make the Step that the turn after `plan` needs; None while one is under way or nothing is to be asked."""
        if self._asked is not None:
            return None
        step = Step(self._last_step + 1)
        self._commit_and_free(step)
        preempted = self._extend(step, plan)
        if not preempted:
            self._allocate(step)
        self._tell_lengths(step)
        if not step:
            return None
        self._last_step = step.step
        self._asked = step
        return step

    def _commit_and_free(self, step: Step) -> None:
        ended = [sequence for sequence, _ in self._to_free]
        for sequence in [*self._running, *ended]:
            self._commit(step, sequence)
        for sequence, reason in self._to_free:
            self._free(step, Free(sequence.id, reason), sequence)
        self._to_free.clear()

    def _commit(self, step: Step, sequence: Sequence) -> None:
        size = self.capacity.block_size
        done = sequence.computed // size
        if done > sequence.committed:
            tokens = sequence.tokens[sequence.committed * size : done * size]
            step.commits.append(Commit(sequence.id, sequence.committed, tokens))
            sequence.committed = done
            self._claims.settle(sequence, done)

    def _tell_lengths(self, step: Step) -> None:
        for sequence in self._running:
            if sequence.computed != sequence.told:
                sequence.told = sequence.computed
                step.lengths.append(Length(sequence.id, sequence.computed))

    def _free(self, step: Step, free: Free, sequence: Sequence) -> None:
        step.frees.append(free)
        self._mirror.release(sequence)
        self._withdraw(sequence)

    def _extend(self, step: Step, plan: StepPlan | None) -> bool:
        """Ask room for the next step, preempting where it must be; then lookahead, where blocks are left."""
        ahead = {work.sequence: work for work in plan.work} if plan else {}
        rooms: dict[int, int] = {}
        preempted = False
        for sequence in list(self._running):
            need = self._need(sequence, ahead.get(sequence.id))
            if need is None or sequence not in self._running:
                continue
            cost = self._mirror.cost(sequence, need)
            while cost > self._mirror.available and self._preempt_after(sequence, step):
                preempted = True
            if 0 < cost <= self._mirror.available:
                self._mirror.available -= cost
                rooms[sequence.id] = need
        for sequence in self._running:
            self._look_ahead(sequence, ahead.get(sequence.id), rooms)
        step.extends = [Extend(sequence, [(sequence, room)]) for sequence, room in rooms.items()]
        self._extended = rooms.keys()
        return preempted

    def _need(self, sequence: Sequence, work: Work | None) -> int | None:
        """Return the room that the sequence's next step needs at least, None when it has no next step."""
        if work and work.samples and sequence.generated + 1 >= sequence.request.stopping.max_tokens:
            return None
        return (work.end if work else sequence.computed) + 1

    def _look_ahead(self, sequence: Sequence, work: Work | None, rooms: dict[int, int]) -> None:
        """Ask for the rest of a prompt as far as one step's budget, or for a decoding sequence's next tokens."""
        need = self._need(sequence, work)
        if need is None or need > max(sequence.room, rooms.get(sequence.id, 0)):
            return
        mirror = self._mirror
        rest = len(sequence.tokens) - need
        if rest > 0:
            more = min(rest, self.limits.token_budget)
        else:
            more = _LOOKAHEAD_TOKENS if mirror.available >= len(self._running) else 0
        wish = min(need + more, sequence.most_slots)
        held = max(len(sequence.table), mirror.blocks_for(rooms.get(sequence.id, 0)))
        extra = min(mirror.blocks_for(wish) - held, mirror.available)
        if extra > 0:
            mirror.available -= extra
            rooms[sequence.id] = min(wish, (held + extra) * mirror.block_size)

    def _preempt_after(self, needy: Sequence, step: Step) -> bool:
        """Preempt the largest running sequence if it is larger than `needy`; return whether there was one."""
        victim = self._running[-1]
        if victim is needy:
            return False
        self._running.pop()
        victim.preemptions += 1
        self.totals.preemptions += 1
        self._free(step, Free(victim.id, FreeReason.PREEMPTED, needy.id), victim)
        insort(self._waiting, victim, key=_key)
        return True

    def _allocate(self, step: Step) -> None:
        """Ask blocks for waiting sequences, smallest first, as far as the next step's budget and the pool go."""
        mirror = self._mirror
        if self._refused_at is not None and mirror.available <= self._refused_at:
            return
        budget = self.limits.token_budget
        spare = self._spare_blocks()
        for sequence in list(self._waiting):
            if budget <= 0 or len(self._running) + len(self._admitting) >= self.limits.max_sequences:
                break
            if self._claims.blocks(sequence):
                continue
            self._ask_admission(step, sequence, spare)
            budget -= len(sequence.tokens)
            needed = mirror.blocks_for(len(sequence.tokens))
            if needed + spare > mirror.available:
                # Only a cached prefix can make it fit. Nobody after it is asked for, or it could be overtaken for ever.
                break
            granted = mirror.blocks_for(min(len(sequence.tokens), self.limits.token_budget))
            mirror.available -= granted
            spare += 1 + needed - granted

    def _spare_blocks(self) -> int:
        """Blocks that running sequences will want soon: the rest of their prompts, and one more for each."""
        return sum(1 + self._mirror.cost(sequence, len(sequence.tokens)) for sequence in self._running)

    def _ask_admission(self, step: Step, sequence: Sequence, spare: int) -> None:
        request = sequence.request
        self._waiting.remove(sequence)
        self._admitting[sequence.id] = sequence
        self._claims.claim(sequence)
        step.allocates.append(
            Allocate(
                group=sequence.id,
                sequence=sequence.id,
                request_id=request.request_id,
                salt=request.salt,
                token_ids=list(sequence.tokens),
                compute_tokens=self.limits.token_budget,
                spare_blocks=spare,
                waited_seconds=max(0.0, self._now - request.arrival),
            )
        )

    # Ends.

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a request, whatever state it is in, and say so."""
        sequence.finish = reason
        del self._by_request[sequence.request.request_id]
        self._outputs.append(Finished(sequence.request.request_id, sequence))
        if sequence in self._running:
            self._running.remove(sequence)
            self._give_back(sequence, _FREE_REASONS[reason])
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
            self._forget(sequence)

    def _give_back(self, sequence: Sequence, reason: FreeReason) -> None:
        self._to_free.append((sequence, reason))

    def _withdraw(self, sequence: Sequence) -> None:
        self._claims.withdraw(sequence)
        sequence.lose_blocks()
        if sequence.finish is not None:
            self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._by_id.pop(sequence.id, None)


def _key(sequence: Sequence) -> OrderKey:
    return sequence.key
