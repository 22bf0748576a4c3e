"""Decides which sequences take part in the next step, and what becomes of what it computed.

All live samples of a request take part together or not at all: what one of them waits for, the others wait for too.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

from blocks import FreeReason, Step, StepResult
from engine.errors import (
    BlockManagerBroken,
    ConstraintFailed,
    EngineUnavailable,
    InvalidRequest,
    PinUnavailable,
    QueueFull,
    RequestExists,
)
from engine.schedule.block_planner import Admitted, BlockPlanner
from engine.schedule.isolated_requests import IsolatedRequests
from engine.schedule.pins import PinnedPrefix, Pins, request_of
from engine.schedule.preemption import PreemptionCosts
from engine.schedule.request import Capacity, Failure, FinishReason, Request
from engine.schedule.request_queue import Limits, RequestQueue, SchedulerTotals
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import Copies, Sampled, StepPlan, Work
from engine.schedule.step_work import Place, counts, gangs, goes_blind, work_of

__all__ = ["Finished", "Limits", "Output", "Scheduler", "SchedulerTotals", "Scored", "Started", "Tokens"]

_FREE_REASONS = {
    FinishReason.STOP: FreeReason.FINISHED,
    FinishReason.LENGTH: FreeReason.FINISHED,
    FinishReason.CANCELLED: FreeReason.CANCELLED,
    FinishReason.FAILED: FreeReason.FAILED,
    FinishReason.PRUNED: FreeReason.PRUNED,
}


class Started(NamedTuple):
    """A request has its first blocks."""

    request_id: str
    cached_tokens: int
    isolated: bool = False  # it is computed with no other in its batch, from the next turn on


class Scored(NamedTuple):
    """Tokens of a request's prompt with their log-probabilities, the first of them at `position`."""

    request_id: str
    position: int
    tokens: list[Sampled]


class Tokens(NamedTuple):
    """New tokens of one sample of a request."""

    request_id: str
    tokens: list[Sampled]
    sample: int = 0
    end: Sequence | None = None  # the sample, if it ended with them

    @property
    def token_ids(self) -> list[int]:
        """Their ids."""
        return [token.token_id for token in self.tokens]


class Finished(NamedTuple):
    """A request ended; the group says how."""

    request_id: str
    group: Group


Output = Started | Scored | Tokens | Finished


class Scheduler:
    """The queue, the running groups, and the engine's copy of their block tables."""

    def __init__(
        self, capacity: Capacity, limits: Limits, costs: PreemptionCosts | None = None, *, ahead: bool = False
    ) -> None:
        """Begin with an empty queue and an empty pool. `costs` is what has been measured of preemption already.

        With `ahead`, steps may be planned before the one under way has told its tokens.
        """
        self.draining = False
        self.ahead = ahead
        self.costs = costs or PreemptionCosts()
        self._roster = RequestQueue(capacity, limits)
        self._roster.mirror.available_host = capacity.host_blocks
        self.pins = Pins(self._roster)
        self._isolation = IsolatedRequests(self._roster)
        self._asking = BlockPlanner(self._roster, self.costs, self.pins, lookahead_tokens=2 if ahead else 1)
        self._outputs: list[Output] = []
        self._stuck: list[tuple[Group, Exception]] = []  # groups that cannot go on, and why
        self._now = 0.0  # of the latest plan

    def drain(self) -> None:
        """Refuse new requests and pins from now on."""
        self.draining = True

    # What the shell sees.

    @property
    def capacity(self) -> Capacity:
        """What one request can have at most."""
        return self._roster.capacity

    @property
    def limits(self) -> Limits:
        """Bounds of a step and of the queue."""
        return self._roster.limits

    @property
    def totals(self) -> SchedulerTotals:
        """What has happened since the engine started."""
        return self._roster.totals

    @property
    def waiting(self) -> int:
        """Requests without blocks."""
        return len(self._roster.waiting) + len(self._roster.admitting)

    @property
    def deferred(self) -> int:
        """Those of them that do not wait for room: another request is computing what they begin with."""
        return min(self.waiting, self._asking.deferred)

    @property
    def running(self) -> int:
        """Requests with blocks."""
        return len(self._roster.running)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens of prompts, and of what was generated before, that live requests have still to compute."""
        return self._roster.uncomputed_tokens

    @property
    def available_blocks(self) -> int:
        """Blocks that could be handed out, as far as answers have told."""
        return self._roster.mirror.available

    @property
    def asking(self) -> bool:
        """Whether a Step is under way."""
        return self._asking.under_way

    @property
    def empty(self) -> bool:
        """Whether no request is live and nothing is left to tell the block manager."""
        roster = self._roster
        return not (roster.by_request or roster.to_free or self.pins.to_tell or self._asking.under_way)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises a RequestRefused, and changes nothing, when it cannot be taken."""
        if self.draining:
            raise EngineUnavailable("the engine is draining")
        if request.request_id in self._roster.by_request:
            raise RequestExists(f"request_id {request.request_id!r} is live", "request_id")
        most, field = self.limits.max_sequences, "beam_search.width" if request.beam_search else "sampling.sample_count"
        least = 0 if request.ended else 1  # that nothing is left of it is another fault
        if not least <= request.sequences <= most:
            raise InvalidRequest(f"{field} is {request.sequences}, this engine runs 1 to {most} sequences", field)
        self.capacity.check(request)
        if self.waiting >= self.limits.max_waiting:
            raise QueueFull(f"{self.waiting} requests wait already, which is the limit")
        try:
            self._add(request)
        except ConstraintFailed as failed:
            raise InvalidRequest(
                f"what was generated cannot go on in the constraint: {failed}", "samples.generated_token_ids"
            ) from failed

    def _add(self, request: Request) -> None:
        self._roster.add(Group.of(request, self._roster.numbers, self.limits.priority_aging))

    def pin(self, name: str, token_ids: tuple[int, ...], salt: bytes, now: float) -> PinnedPrefix:
        """Declare a prefix, whose whole blocks are then computed and pinned; doing so again changes nothing.

        Return it; its state changes. Raises a PinRefused, and changes nothing, when it cannot be taken.
        """
        if self.draining:
            raise PinUnavailable("the engine is draining")
        if (pin := self.pins.find(name, token_ids, salt)) is None:
            pin = self.pins.declare(name, token_ids, salt)
            self._add(request_of(pin, now))
        return pin

    def unpin(self, name: str) -> None:
        """Remove a pin with the next Step; its blocks stay cached. Raises UnknownPin."""
        self.cancel(self.pins.withdraw(name).request_id)

    def reset(self, now: float) -> None:
        """Forget the prefix cache with the next Step; what is pinned is computed anew, and pinned again."""
        for pin in self.pins.reset():
            self.cancel(pin.request_id)
            self._add(request_of(pin, now))

    def cancel(self, request_id: str) -> None:
        """End a request; an unknown id is ignored. Its blocks go back with the next Step."""
        group = self._roster.by_request.get(request_id)
        if group is not None:
            self._end(group, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """End every live request. Their blocks go back with the next Step."""
        for group in list(self._roster.by_request.values()):
            self._end(group, FinishReason.CANCELLED)

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request, as a stop does; what is unknown or has ended is ignored."""
        group = self._roster.by_request.get(request_id)
        if group is None or group.beams or not 0 <= index < len(group.members):
            return
        if group.members[index].finish is not None:
            return
        member = group.members[index]
        member.finish = FinishReason.STOP
        if group.ended:
            self._close(group)
        elif group.id not in self._roster.admitting:
            self._let_go(member)
            if not any(other.table for other in group.members):
                group.gather()

    def undo_asked(
        self, available_blocks: int, available_host_blocks: int = 0, pins: Collection[str] = frozenset()
    ) -> None:
        """The Step under way is never answered: its frees, commits and forks hold, but nothing was granted or moved.

        `pins` are the ids of those that hold blocks.
        """
        self._asking.undo(available_blocks, available_host_blocks, pins)

    def take_outputs(self) -> list[Output]:
        """Return what is to be told since the last call."""
        outputs, self._outputs = self._outputs, []
        self._isolation.announced()
        return outputs

    def apply(self, result: StepResult) -> None:
        """Take an answer of the block manager in."""
        for admitted in self._asking.apply(result):
            self._admit(admitted)
        if result.withheld_blocks:
            self._shrink(len(result.withheld_blocks))

    def ask(self, plan: StepPlan | None) -> Step | None:
        """Make the Step that the turn after `plan` needs; None while one is under way or nothing is to be asked."""
        if not self.asking:
            for group in [one for one in self._roster.running if one.request.prefill_only and one.to_fork]:
                self._end(group, FinishReason.STOP)
        return self._asking.ask(plan, self._now)

    def _admit(self, admitted: Admitted) -> None:
        group, cached_tokens = admitted
        if group.ended:  # cancelled while its blocks were asked for
            self._roster.give_back(group.members, FreeReason.CANCELLED)
            return
        if group.preemptions:
            group.resumed_at.append(self._now)
        if cached_tokens is None:  # swapped in, as it was
            self._roster.run(group)
            return
        trunk = group.trunk
        trunk.computed = trunk.told = cached_tokens
        trunk.committed = cached_tokens // self.capacity.block_size
        self._roster.claims.settle(group, trunk.committed)
        self._roster.run(group)
        if not group.started and not group.request.prefill_only:
            group.started = True
            group.cached_tokens = cached_tokens
            self.totals.prompt_tokens += len(group.request.prompt)
            self.totals.cached_tokens += min(cached_tokens, len(group.request.prompt))
            self._outputs.append(Started(group.request.request_id, cached_tokens, group.isolated))

    def _shrink(self, withheld: int) -> None:
        """Go on without blocks that an audit took out; who can never fit any more fails."""
        self._roster.capacity = replace(self.capacity, device_blocks=self.capacity.device_blocks - withheld)
        for group in list(self._roster.by_request.values()):
            # What is being computed to be pinned is counted as pinned already.
            needed = 0 if group.request.prefill_only else self.capacity.most_blocks(group.request)
            if needed > (left := self.capacity.unpinned_blocks):
                detail = f"it can need {needed} blocks, but {left} are left: others are withheld or pinned"
                self._fail(group, Failure.BLOCK_MANAGER, detail)

    # The next step.

    def plan(self, now: float) -> StepPlan | None:
        """Choose the next step's work among groups whose blocks are there; None when there is nothing to do."""
        self._begin_step(now)
        budget = self.limits.token_budget
        work: list[Work] = []
        for gang in gangs(self._isolation.batch(now, asking=self.asking), {}):
            if fed := counts(gang, budget):
                budget -= sum(fed)
                work += self._works(gang, fed)
            elif budget > 0:
                self.totals.left_out += sum(self._asking.late_for(place.sequence) for place in gang)
        if self._stuck:
            self._end_stuck()
            return self.plan(now)  # anew, without them
        if not work and not self._asking.copies:
            return None
        return self._made(StepPlan(self.totals.steps + 1, self._take_copies(), tuple(work)))

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is under way; of sequences nothing changes before it is adopted.

        None where the tokens of `plan` have to be known first, or somebody would be left out who need not be.
        """
        under_way = {work.sequence: work for work in plan.work}
        if (
            not self.ahead
            or self._roster.holds_isolated
            or not all(goes_blind(self._roster.sequence(number).group) for number in under_way)
        ):
            return None
        budget = self.limits.token_budget
        work: list[Work] = []
        for gang in gangs(self._roster.running, under_way):
            fed = counts(gang, budget)
            if not fed and any(place.start >= place.sequence.room for place in gang):
                return None
            budget -= sum(fed)
            work += self._works(gang, fed)
        if self._stuck:  # they end with the next plan: the step under way is theirs too
            self._stuck.clear()
            return None
        return StepPlan(plan.step + 1, self._take_copies(), tuple(work)) if work else None

    def adopt(self, ahead: StepPlan, now: float) -> StepPlan:
        """Return what is left of a step that was planned ahead, now that the tokens before it are known.

        Who has ended meanwhile, or was moved, has no part in it: what it computes for them counts for nothing.
        """
        self._begin_step(now)
        known = [self._known(work) for work in ahead.work]
        if self._stuck:
            self._end_stuck()
            return self.adopt(ahead, now)
        return self._made(StepPlan(ahead.step, ahead.copies, tuple(work for work in known if work is not None)))

    def _take_copies(self) -> tuple[Copies, ...]:
        copies, self._asking.copies = tuple(self._asking.copies), []
        return copies

    def _begin_step(self, now: float) -> None:
        self._now = now
        self._end_late(now)

    def _made(self, plan: StepPlan) -> StepPlan:
        self.totals.steps = plan.step
        self.totals.planned += len(plan.work)
        for work in plan.work:
            group = self._roster.sequence(work.sequence).group
            if group.scheduled_at is None:
                group.scheduled_at = self._now
        return plan

    def _known(self, work: Work) -> Work | None:
        """Return the work with its tokens, None if it is not what its sequence needs."""
        sequence = self._roster.find(work.sequence)
        if sequence is None or sequence.group not in self._roster.running or sequence.leaving:
            return None
        needless = sequence.finish is not None and sequence.group.forked
        if needless or not sequence.table or sequence.computed != work.start:
            return None
        known = self._works([Place(sequence, work.start, 0)], [len(work.token_ids)])
        return known[0] if known and known[0]._replace(token_ids=work.token_ids) == work else None

    def _works(self, gang: list[Place], fed: list[int]) -> list[Work]:
        """Return the work of a gang; none where what its request asks for raises, which it then ends with."""
        size = self._roster.capacity.block_size
        try:
            return [work_of(place, count, size) for place, count in zip(gang, fed, strict=False)]
        except Exception as fault:
            self._stuck.append((gang[0].sequence.group, fault))
            return []

    def _end_late(self, now: float) -> None:
        late = [
            group
            for group in self._roster.by_request.values()
            if group.request.deadline is not None and group.request.deadline <= now
        ]
        for group in late:
            if group.scheduled_at is None:
                self._fail(group, Failure.DEADLINE_QUEUED, "its time was over in the queue")
            else:
                self._fail(group, Failure.DEADLINE, "its time was over while it ran")

    # What came of it.

    def publish(self, plan: StepPlan, brought: list[Sampled], now: float) -> None:
        """Take in what a step computed: lengths, scored and new tokens, and the requests that end with them."""
        sampled = iter(brought)
        found: dict[Group, list[Sampled]] = {}
        for work in plan.work:
            scores = [next(sampled) for _ in work.to_score.token_ids] if work.to_score else []
            tokens = [next(sampled) for _ in work.sample_indices] if work.samples else []
            sequence = self._roster.sequence(work.sequence)
            self._count_computed(sequence, work)
            if sequence.table:
                sequence.computed = work.end
            else:  # it was preempted while the step ran: the token counts, its K and V are gone
                sequence.lost_tokens = max(sequence.lost_tokens, work.end)
            group = sequence.group
            try:
                self._take_scores(group, scores)
                if not group.beams:
                    self._take_tokens(group, zip(work.sample_indices, tokens, strict=False), now)
                elif tokens:
                    found.setdefault(group, []).extend(tokens)
            except Exception as fault:
                self._stop(group, fault)
        for group, continuations in found.items():
            try:
                self._advance_beams(group, continuations, now)
            except Exception as fault:
                self._stop(group, fault)
        self._end_stuck()

    def _count_computed(self, sequence: Sequence, work: Work) -> None:
        recomputed = max(0, min(work.end, sequence.lost_tokens) - work.start)
        sequence.group.recomputed_tokens += recomputed
        self.totals.recomputed_tokens += recomputed
        self.totals.computed_tokens += len(work.token_ids)

    def _take_scores(self, group: Group, scores: list[Sampled]) -> None:
        if scores:
            _check_faults(scores)
            self._outputs.append(Scored(group.request.request_id, group.scored, scores))
            group.scored += len(scores)

    def _take_tokens(self, group: Group, tokens: Iterable[tuple[int, Sampled]], now: float) -> None:
        for index, token in tokens:
            member = group.members[index]
            if token.fault is not None:
                raise token.fault
            self._count_generated(group, 1, now)
            member.append(token.token_id)
            end = None if member.finish is None else member
            self._outputs.append(Tokens(group.request.request_id, [token], index, end))
            self._let_go(member)
        if group.ended:
            self._close(group)
        elif not any(member.table for member in group.members):
            group.gather()  # it was preempted while the step ran, and comes back with these tokens too

    def _count_generated(self, group: Group, tokens: int, now: float) -> None:
        self.totals.generated_tokens += tokens
        if group.first_token_at is None:
            group.first_token_at = now
            group.isolated = group.isolated and group.beams is not None
        group.last_token_at = now

    def _advance_beams(self, group: Group, found: list[Sampled], now: float) -> None:
        """Let a search take in what was found for each of its beams: they branch, or it is over."""
        assert group.beams, "it is a search"
        _check_faults(found)
        self._count_generated(group, len(found), now)
        texts = [beam.tokens[len(group.request.prompt) :] for beam in group.live]
        kept = group.beams.advance(texts, [one.top for one in found])
        if group.beams.over:
            self._tell_answers(group)
            return
        self._roster.know(group.branch(kept, self._roster.numbers))
        self._roster.give_back([one for one in group.members if one.finish is not None], FreeReason.PRUNED)
        if not any(beam.table for beam in group.live):
            group.gather()  # it was preempted while the step ran, and comes back with these beams

    def _tell_answers(self, group: Group) -> None:
        group.answer(FinishReason.STOP, self._roster.numbers)
        for answer in group.answers:
            tokens = [Sampled(token) for token in answer.tokens[len(group.request.prompt) :]]
            self._outputs.append(Tokens(group.request.request_id, tokens, answer.index, answer))
        self._end(group, FinishReason.STOP)

    def _stop(self, group: Group, fault: Exception) -> None:
        """Note that a request cannot go on, by what was raised for it alone. Raises what no request is to blame for."""
        if isinstance(fault, BlockManagerBroken):
            raise fault
        self._stuck.append((group, fault))

    def _end_stuck(self) -> None:
        """Fail who cannot go on; at the end of a step, because the work that follows may be of the same group."""
        stuck, self._stuck = self._stuck, []
        for group, fault in stuck:
            self._end_for(group, fault)

    def _end_for(self, group: Group, fault: Exception) -> None:
        if self._roster.by_request.get(group.request.request_id) is not group:
            return
        if group.beams:  # whatever it has found is not told
            group.beams.over, group.answers = False, []
        if isinstance(fault, ConstraintFailed):
            self._fail(group, Failure.CONSTRAINT, f"the constraint cannot be followed any further: {fault}")
        else:
            group.fault = fault
            self._fail(group, Failure.REQUEST, f"the engine failed at this request: {type(fault).__name__}: {fault}")

    def fail_request(self, request_id: str, fault: Exception) -> None:
        """End a request for what was raised for it alone; an unknown id is ignored."""
        if (group := self._roster.by_request.get(request_id)) is not None:
            self._end_for(group, fault)

    def _let_go(self, member: Sequence) -> None:
        """Let a sample that has ended give its blocks back; a trunk is needed until the others are forked from it."""
        group = member.group
        if member.finish is not None and not group.ended and (group.forked or member is not group.trunk):
            self._roster.give_back([member], _FREE_REASONS[member.finish])

    def fail(self, plan: StepPlan, detail: str) -> None:
        """A step was not done: end its requests. What earlier steps computed stays committed and cached."""
        groups = dict.fromkeys(self._roster.sequence(work.sequence).group for work in plan.work)
        for group in groups:
            self._fail(group, Failure.STEP, detail)

    def fail_all(self, failure: Failure, detail: str) -> None:
        """End every live request as failed."""
        for group in list(self._roster.by_request.values()):
            self._fail(group, failure, detail)

    # Ends.

    def _fail(self, group: Group, failure: Failure, detail: str) -> None:
        group.failure, group.detail = failure, detail
        self.totals.failures[failure] += 1
        self._end(group, FinishReason.FAILED)

    def _end(self, group: Group, reason: FinishReason) -> None:
        """End the samples of a request that have not ended, whatever state it is in."""
        for member in group.live:
            member.finish = reason
        self._close(group)

    def _close(self, group: Group) -> None:
        """Say that a request has ended, and let its blocks go."""
        roster = self._roster
        if group.beams and not group.answers:
            group.answer(group.members[0].finish or FinishReason.FAILED, roster.numbers)
        del roster.by_request[group.request.request_id]
        group.held_blocks = len(group.blocks)
        if group.request.prefill_only:
            self.pins.ended(group)
        else:
            self._outputs.append(Finished(group.request.request_id, group))
        if group.id in roster.admitting:
            return  # its blocks are under way: it is closed when they come
        if group in roster.running:
            roster.running.remove(group)
        elif group in roster.waiting:
            roster.stop_waiting(group)
        for member in list(group.members):
            assert member.finish is not None, "it has ended"
            roster.give_back([member], _FREE_REASONS[member.finish])


def _check_faults(brought: Iterable[Sampled]) -> None:
    """Raise what kept one of these from being sampled."""
    for one in brought:
        if one.fault is not None:
            raise one.fault
