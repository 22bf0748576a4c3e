"""The engine's scheduler: for each turn, the work of the next step and the block step for the block manager."""

from collections.abc import Collection
from collections.abc import Sequence as Items
from enum import Enum

from blocks import FreeReason, Reattached, Step, StepResult
from engine.schedule.capacity import Capacity
from engine.schedule.endings import RequestEndings
from engine.schedule.isolated_requests import IsolatedRequests
from engine.schedule.limits import Limits
from engine.schedule.live_requests import LiveRequests
from engine.schedule.outputs import Output, Outputs, Started
from engine.schedule.planning.step_planner import StepPlanner
from engine.schedule.pool.admission import Admitted
from engine.schedule.pool.block_planner import BlockPlanner
from engine.schedule.pool.condemnations import (
    AdmittedBlocks,
    Proof,
    WrongBlock,
    admitted_blocks,
    may_have_been_read,
)
from engine.schedule.pool.pins import Pins
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.preemption import PreemptionCosts
from engine.schedule.pool.recomputations import Recomputations
from engine.schedule.pool.releases import Releases
from engine.schedule.publisher import Publisher
from engine.schedule.request import Failure, FinishReason
from engine.schedule.request_queue import RequestQueue
from engine.schedule.speculation.speculator import Speculator
from engine.schedule.step_plan import Sampled, StepPlan


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
        self._isolation = IsolatedRequests(self._queue)
        self.totals = self._queue.totals
        self.pins = Pins(self._queue, self._view)
        self._endings = RequestEndings(self._queue, self._releases, self.pins, self._outputs)
        self.requests = LiveRequests(self._queue, self._view, self.pins, self._endings)
        lookahead = 2 if ahead else 1
        self._blocks = BlockPlanner(self._queue, self._view, self._releases, self.pins, self.costs, lookahead)
        self._speculator = Speculator(self._queue) if limits.proposed_tokens else None
        self._steps = StepPlanner(
            self._queue,
            self._view,
            self._blocks,
            self._isolation,
            self.requests,
            self._endings,
            self._speculator,
            counts_tokens=counts_tokens,
        )
        self._publisher = Publisher(
            self._queue, self._releases, self._isolation, self._endings, self._outputs, self._speculator
        )
        self._proof: Proof | None = None
        self._recomputations: Recomputations | None = None
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
        if self._steps.can_compute():
            return None
        if self.empty:
            return IdleReason.EMPTY
        if not connected:
            return IdleReason.DISCONNECTED
        return IdleReason.ANSWER if self.step_in_flight else None

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call."""
        self._isolation.on_outputs_taken()
        return self._outputs.take()

    # The block manager.

    def build_step(self, plan: StepPlan | None) -> Step | None:
        """Build the block step needed after `plan`; None if one is in flight or nothing is needed."""
        if not self.step_in_flight:
            for group in [one for one in self._queue.prefills if one.ready_to_fork]:
                if group.request.scratch and self._recomputations is not None:
                    self._condemn(self._recomputations.compare(group))
                self._endings.end(group, FinishReason.STOP)
        return self._blocks.build_step(plan, self._steps.now)

    def prove_with(self, proof: Proof) -> None:
        """Let `proof` make the copies of results, which then are in no plan, and compare what groups are admitted with.

        Groups that hold a wrong block wait again before anything is computed from it.
        """
        assert not self.ahead, "a step in flight may read what a copy overwrites"
        self._proof = proof
        self._recomputations = Recomputations(self._queue, self._view, self.requests, proof)

    def apply(self, result: StepResult) -> None:
        """Apply a result of the block manager."""
        admitted = [one for one in self._blocks.apply(result) if self._admit(one)]
        withheld = [result.withheld_blocks, *[one.withheld_blocks for one in result.windows]]
        if any(withheld):
            self.requests.withhold(withheld)
        if self._proof is not None:
            arrivals = [arrival for one in admitted for arrival in admitted_blocks(*one, self._view.block_size)]
            self._condemn(self._proof.check(self._blocks.take_copies(), arrivals))
            for arrival in arrivals:
                self._recompute(arrival)
        for one in admitted:
            self._start(one)

    def _recompute(self, hit: AdmittedBlocks) -> None:
        sequence = self._queue.find(hit.sequence)
        if self._recomputations is not None and sequence is not None and self._queue.runs(sequence.group):
            self._recomputations.consider(sequence.group, hit, self._steps.now)

    def _condemn(self, wrong: Items[WrongBlock]) -> None:
        if wrong:
            now = self._steps.now
            self.requests.condemn(self._blocks.condemn(wrong, now), now, reset=any(map(may_have_been_read, wrong)))

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
        group.stats.resume(self._steps.now)
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

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """Return the next step among the groups that have blocks, or None if there is nothing to do."""
        return self._steps.plan(now)

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is in flight; None if that is impossible or `ahead` is off."""
        return self._steps.plan_ahead(plan) if self.ahead else None

    def adopt(self, ahead: StepPlan, now: float) -> StepPlan:
        """Return the valid part of a step planned ahead, after the tokens before it were sampled."""
        return self._steps.adopt(ahead, now)

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
