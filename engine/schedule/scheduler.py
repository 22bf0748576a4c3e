"""The engine's scheduler: in each turn it plans the next step, and a block step for the block manager.

The order is that of the queue: by priority, then by arrival. A group runs only when the block manager has answered: its
first blocks make it running, and it computes only within the room of its sequences, which answers grant. What the step
after the next needs is requested while the next one runs, so that the answer is there in time; if the pool is full, the
last groups in the order are preempted for it. Live samples of a request take part in a step together, or not at all.
"""

from collections.abc import Collection
from collections.abc import Sequence as Items
from enum import Enum

from blocks import FreeReason, Reattached, Step, StepResult
from engine.schedule.capacity import Capacity
from engine.schedule.endings import RequestEndings
from engine.schedule.isolation import on_outputs_taken, runnable
from engine.schedule.limits import Limits
from engine.schedule.live_requests import LiveRequests
from engine.schedule.outputs import Output, Outputs, Started
from engine.schedule.planning.prefill_order import PrefillOrder
from engine.schedule.planning.step_work import (
    Cursor,
    can_compute,
    decoding_alone,
    decoding_work,
    list_gangs,
    token_counts,
    work_of,
)
from engine.schedule.planning.steps_ahead import StepsAhead
from engine.schedule.pool.admission import Admitted
from engine.schedule.pool.block_planner import BlockPlanner
from engine.schedule.pool.condemnations import Proof
from engine.schedule.pool.pins import Pins
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.preemption import PreemptionCosts
from engine.schedule.pool.proven_blocks import ProvenBlocks
from engine.schedule.pool.releases import Releases
from engine.schedule.publisher import Publisher
from engine.schedule.request import Failure, FinishReason
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group
from engine.schedule.speculation.speculator import Speculator
from engine.schedule.step_plan import Sampled, StepPlan, Work


class IdleReason(Enum):
    """Why the next turn of the loop can do nothing until something arrives."""

    EMPTY = "no request is live"
    ANSWER = "the block manager has not answered the block step in flight"
    DISCONNECTED = "the block manager is disconnected"


class Scheduler:
    """Combines the owners of scheduling state: queue, pool view, pins and outputs.

    `requests` is the API for requests; the other methods are for the loop that runs steps.
    """

    def __init__(
        self,
        capacity: Capacity,
        limits: Limits,
        costs: PreemptionCosts | None = None,
        *,
        ahead: bool = False,
        counts_tokens: bool = False,
        withheld: Items[Collection[int]] = ((),),
    ) -> None:
        """Start with an empty queue and an empty pool. `costs` are the measured costs of preemption.

        With `ahead`, steps are planned while the previous one is in flight. `counts_tokens` is the sampler's.
        `withheld` are device blocks of each kind that stay out of circulation since an earlier process. Raises
        ValueError if tokens are to be proposed `ahead`: proposals continue the tokens of the previous step.
        """
        if ahead and limits.proposed_tokens:
            raise ValueError(f"proposed_tokens must be 0 where steps are planned ahead, not {limits.proposed_tokens}")
        self.ahead = ahead
        self.limits = limits
        self.pool = capacity  # with the withheld blocks
        self.costs = costs or PreemptionCosts()
        self._queue = RequestQueue(limits)
        self._view = PoolView(capacity)
        self._releases = Releases(self._queue, self._view)
        self._outputs = Outputs()
        self.totals = self._queue.totals
        self.pins = Pins(self._queue, self._view)
        self._endings = RequestEndings(self._queue, self._releases, self.pins, self._outputs)
        self.requests = LiveRequests(self._queue, self._view, self.pins, self._endings)
        lookahead = 2 if ahead else 1
        self._blocks = BlockPlanner(self._queue, self._view, self._releases, self.pins, self.costs, lookahead)
        self._prefill = PrefillOrder(self._queue, self._view.claims, lambda: self._blocks.next_admitted)
        self._speculator = Speculator(self._queue) if limits.proposed_tokens else None
        self._steps_ahead = StepsAhead(
            self._queue, self._view, self._prefill, self._endings, counts_tokens=counts_tokens
        )
        self._publisher = Publisher(self._queue, self._releases, self._endings, self._outputs, self._speculator)
        self._proven: ProvenBlocks | None = None
        self.requests.withhold(withheld)

    @property
    def capacity(self) -> Capacity:
        """Limits of one request."""
        return self._view.capacity

    @property
    def waiting(self) -> int:
        """Number of requests without blocks."""
        return len(self._queue.waiting) + len(self._queue.admitting)

    @property
    def deferred(self) -> int:
        """Number of waiting requests that wait for another request to compute their prefix, not for blocks."""
        return min(self.waiting, self._blocks.deferred)

    @property
    def running(self) -> int:
        """Number of requests with blocks."""
        return len(self._queue.running)

    @property
    def uncomputed_tokens(self) -> int:
        """Number of known tokens (prompts, and tokens generated before) that live requests must still compute."""
        return self._queue.uncomputed_tokens

    @property
    def available_blocks(self) -> int:
        """Number of allocatable blocks, as of the latest result."""
        return self._view.available

    @property
    def step_in_flight(self) -> bool:
        """Whether a block step was sent to the block manager and not answered."""
        return self._blocks.in_flight

    @property
    def empty(self) -> bool:
        """Whether no request is live, no block step is in flight, and no release or pin change is pending."""
        return not (self._queue.by_request or self._releases.pending or self.pins.has_changes or self.step_in_flight)

    def idle_reason(self, *, connected: bool) -> IdleReason | None:
        """Return why nothing can be done after a turn without progress; None if another turn may make some.

        `connected`: a block step can be sent to the block manager.
        """
        groups = runnable(self._queue, self.requests.now, step_in_flight=self.step_in_flight)
        if self._blocks.has_copies or can_compute(groups, self.limits.token_budget):
            return None
        if self.empty:
            return IdleReason.EMPTY
        if not connected:
            return IdleReason.DISCONNECTED
        return IdleReason.ANSWER if self.step_in_flight else None

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call."""
        on_outputs_taken(self._queue)
        return self._outputs.take()

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step among the groups that have blocks, or None if there is nothing to do.

        In the order of the queue, decoding samples take what they need of the token budget; prompts divide the rest.
        A sequence without room sits out; `build_step`, while this step runs, requests room for the one after it, and
        preempts for that.
        """
        self.requests.fail_expired(now)
        groups = runnable(self._queue, now, step_in_flight=self.step_in_flight)
        work, others = self._decode(groups)
        gangs, prompts = list_gangs(others, {})
        budget = self.limits.token_budget - len(work)
        for gang in gangs:
            budget -= self._feed(work, gang, token_counts(gang, budget), budget)
        for prompt, tokens in zip(prompts, self._prefill.divide(prompts, budget), strict=True):
            self._feed(work, [prompt], [tokens] if tokens else [], budget)
        if self._speculator is not None:
            work = self._speculator.propose(work, self._endings.record_fault)
        if self._endings.fail_faulty():
            return self.plan(now)  # again, without the failed groups
        if not work and not self._blocks.has_copies:
            return None
        return self._queue.count_step(StepPlan(self.totals.steps + 1, self._blocks.take_copies(), tuple(work)), now)

    def _decode(self, groups: Items[Group]) -> tuple[list[Work], list[Group]]:
        """Return the work of groups with one sequence that decodes, as nearly all have; and the other groups."""
        work: list[Work] = []
        others: list[Group] = []
        for group in groups:
            if (sequence := decoding_alone(group)) is None:
                others.append(group)
            elif sequence.lacks_room:
                self._blocks.count_skipped(sequence)
            else:
                try:
                    work.append(decoding_work(sequence))
                except Exception as fault:
                    self._endings.record_fault(group, fault)
        return work, others

    def _feed(self, work: list[Work], gang: list[Cursor], fed: list[int], budget: int) -> int:
        """Add the work of sequences that take part together, `fed` tokens each; return how many tokens they take.

        They sit out if `fed` is empty. An exception raised for their request is recorded.
        """
        if not fed and budget > 0:
            for cursor in gang:
                if cursor.lacks_room or len(gang) > 1:
                    self._blocks.count_skipped(cursor.sequence)
        try:
            work += [work_of(cursor, count) for cursor, count in zip(gang, fed, strict=False)]
        except Exception as fault:
            self._endings.record_fault(gang[0].sequence.group, fault)
        return sum(fed)

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is in flight; None if that is impossible or `ahead` is off."""
        work = self._steps_ahead.work_after(plan) if self.ahead else []
        return StepPlan(plan.step + 1, self._blocks.take_copies(), tuple(work)) if work else None

    def adopt(self, ahead: StepPlan, now: float) -> StepPlan:
        """Return the valid part of a step planned ahead, after the tokens before it were sampled."""
        self.requests.fail_expired(now)
        valid = self._steps_ahead.still_valid(ahead)
        return self.adopt(ahead, now) if self._endings.fail_faulty() else self._queue.count_step(valid, now)

    def publish(self, plan: StepPlan, results: list[Sampled], now: float) -> None:
        """Process the results of a step: lengths, scores, tokens, and requests that end."""
        self._publisher.publish(plan, results, now)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Count the duration of a step, for the costs of preemption and of proposals."""
        self.costs.observe(plan, seconds)
        if self._speculator is not None:
            self._speculator.observe(plan, seconds)

    def fail(self, plan: StepPlan, detail: str) -> None:
        """Fail the requests of a failed step. Tokens computed by earlier steps stay committed and cached."""
        groups = dict.fromkeys(self._queue.sequence(work.sequence).group for work in plan.work)
        for group in groups:
            self._endings.fail(group, Failure.STEP, detail)

    # The block manager.

    def build_step(self, plan: StepPlan | None) -> Step | None:
        """Build the block step needed after `plan`; None if one is in flight or nothing is needed."""
        if not self.step_in_flight:
            for group in [one for one in self._queue.prefills if one.ready_to_fork]:
                if group.request.scratch and self._proven is not None:
                    self._proven.compare(group, self.requests.now)
                self._endings.end(group, FinishReason.STOP)
        return self._blocks.build_step(plan, self.requests.now)

    def prove_with(self, proof: Proof) -> None:
        """Let `proof` make the copies of answers, which then are in no plan, and compare blocks before use."""
        assert not self.ahead, "a step in flight may read what a copy overwrites"
        self._proven = ProvenBlocks(self._queue, self._view, self.requests, self._blocks, proof)

    def apply(self, result: StepResult) -> None:
        """Apply an answer of the block manager: from now on the groups that it admits run."""
        admitted = [one for one in self._blocks.apply(result) if self._admit(one)]
        withheld = [result.withheld_blocks, *[one.withheld_blocks for one in result.windows]]
        if any(withheld):
            self.requests.withhold(withheld)
        if self._proven is not None:
            self._proven.check(admitted, self.requests.now)
        for one in admitted:
            self._start(one)

    def rollback_step(self, reattached: Reattached) -> None:
        """Roll back the block step in flight, which will not be answered.

        Its frees, commits, trims and forks hold, grants and moves do not.
        """
        self._blocks.rollback(reattached)

    def _admit(self, admitted: Admitted) -> bool:
        """Let a group run, and return whether it has not ended meanwhile."""
        group, cached_tokens = admitted
        if group.ended:  # cancelled while its allocation was in flight
            self._releases.release(group.members, FreeReason.CANCELLED)
            return False
        group.stats.resume(self.requests.now)
        if cached_tokens is not None:  # None: swapped in, nothing changed
            cached_blocks = cached_tokens // self._view.block_size
            group.trunk.set_cached(cached_tokens, cached_blocks)
            self._view.claims.on_cached(group, cached_blocks)
        self._queue.add_running(group)
        return True

    def _start(self, admitted: Admitted) -> None:
        """Report the start of a request, unless it waits again or has ended."""
        group, cached_tokens = admitted
        if cached_tokens is None or group.stats.started or group.request.prefill_only or not self._queue.runs(group):
            return
        group.stats.start(cached_tokens)
        self.totals.count_started(len(group.request.prompt), cached_tokens)
        if self._speculator is not None:
            self._speculator.count_request(group.request)
        self._outputs.emit(Started(group.request.request_id, cached_tokens, group.isolated))
