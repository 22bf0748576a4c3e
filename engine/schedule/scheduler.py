"""The engine's scheduler: turn by turn, what the next step computes, and what it asks of the block manager."""

from collections.abc import Collection

from blocks import FreeReason, Step, StepResult
from engine.schedule.endings import RequestEndings
from engine.schedule.isolated_requests import IsolatedRequests
from engine.schedule.limits import Limits
from engine.schedule.live_requests import LiveRequests
from engine.schedule.outputs import Output, Outputs, Started
from engine.schedule.pool.admission import Admitted
from engine.schedule.pool.block_planner import BlockPlanner
from engine.schedule.pool.pins import Pins
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.preemption import PreemptionCosts
from engine.schedule.pool.releases import Releases
from engine.schedule.publisher import Publisher
from engine.schedule.request import Capacity, Failure, FinishReason
from engine.schedule.request_queue import RequestQueue
from engine.schedule.step_plan import Sampled, StepPlan
from engine.schedule.step_planner import StepPlanner


class Scheduler:
    """Puts together those who own the state: the queue, the view of the pool, pins, and what waits to be delivered.

    `requests` takes requests in and ends them; the rest is for the loop that runs steps.
    """

    def __init__(
        self, capacity: Capacity, limits: Limits, costs: PreemptionCosts | None = None, *, ahead: bool = False
    ) -> None:
        """Begin with an empty queue and an empty pool. `costs` is what has been measured of preemption already.

        With `ahead`, steps may be planned before the one under way has brought its tokens.
        """
        self.ahead = ahead
        self.limits = limits
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
        self._steps = StepPlanner(self._queue, self._view, self._blocks, self._isolation, self.requests, self._endings)
        self._publisher = Publisher(self._queue, self._releases, self._isolation, self._endings, self._outputs)

    @property
    def capacity(self) -> Capacity:
        """What one request can have at most."""
        return self._view.capacity

    @property
    def waiting(self) -> int:
        """Requests without blocks."""
        return len(self._queue.waiting) + len(self._queue.admitting)

    @property
    def deferred(self) -> int:
        """Those of them that do not wait for room: another request is computing what they begin with."""
        return min(self.waiting, self._blocks.deferred)

    @property
    def running(self) -> int:
        """Requests with blocks."""
        return len(self._queue.running)

    @property
    def uncomputed_tokens(self) -> int:
        """Tokens of prompts, and of what was generated before, that live requests have still to compute."""
        return self._queue.uncomputed_tokens

    @property
    def available_blocks(self) -> int:
        """Blocks that could be handed out, as of the latest answer."""
        return self._view.available

    @property
    def step_in_flight(self) -> bool:
        """Whether a Step is under way."""
        return self._blocks.in_flight

    @property
    def empty(self) -> bool:
        """Whether no request is live and nothing is left to ask of the block manager."""
        return not (self._queue.by_request or self._releases.pending or self.pins.has_changes or self.step_in_flight)

    def take_outputs(self) -> list[Output]:
        """Return what is to be delivered since the last call."""
        self._isolation.on_outputs_taken()
        return self._outputs.take()

    # The block manager.

    def build_step(self, plan: StepPlan | None) -> Step | None:
        """Make the Step that the turn after `plan` needs; None while one is under way or nothing is to be asked."""
        if not self.step_in_flight:
            for group in [one for one in self._queue.running if one.request.prefill_only and one.ready_to_fork]:
                self._endings.end(group, FinishReason.STOP)
        return self._blocks.build_step(plan, self._steps.now)

    def apply(self, result: StepResult) -> None:
        """Take an answer of the block manager in."""
        for admitted in self._blocks.apply(result):
            self._admit(admitted)
        if result.withheld_blocks:
            self.requests.withhold(len(result.withheld_blocks))

    def rollback_step(
        self, available_blocks: int, available_host_blocks: int = 0, pins: Collection[str] = frozenset()
    ) -> None:
        """The Step under way is never answered: its frees, commits and forks hold, but nothing was granted or moved.

        `pins` are the ids of those that hold blocks.
        """
        self._blocks.rollback(available_blocks, available_host_blocks, pins)

    def _admit(self, admitted: Admitted) -> None:
        group, cached_tokens = admitted
        if group.ended:  # cancelled while its blocks were asked for
            self._releases.release(group.members, FreeReason.CANCELLED)
            return
        group.stats.resume(self._steps.now)
        if cached_tokens is not None:  # else it was swapped in, as it was
            cached_blocks = cached_tokens // self._view.block_size
            group.trunk.set_cached(cached_tokens, cached_blocks)
            self._view.claims.release(group, cached_blocks)
        self._queue.add_running(group)
        if cached_tokens is not None and not group.stats.started and not group.request.prefill_only:
            group.stats.start(cached_tokens)
            self.totals.count_started(len(group.request.prompt), cached_tokens)
            self._outputs.emit(Started(group.request.request_id, cached_tokens, group.isolated))

    # Steps.

    def plan(self, now: float) -> StepPlan | None:
        """Choose the next step's work among groups whose blocks are there; None when there is nothing to do."""
        return self._steps.plan(now)

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Plan the step after `plan`, which is under way; None where that cannot be, or the engine does not do so."""
        return self._steps.plan_ahead(plan) if self.ahead else None

    def adopt(self, ahead: StepPlan, now: float) -> StepPlan:
        """Return the rest of a step planned ahead, once the tokens before it have been sampled."""
        return self._steps.adopt(ahead, now)

    def publish(self, plan: StepPlan, results: list[Sampled], now: float) -> None:
        """Take in what a step computed: lengths, scored and new tokens, and the requests that end with them."""
        self._publisher.publish(plan, results, now)

    def fail(self, plan: StepPlan, detail: str) -> None:
        """A step was not done: end its requests. What earlier steps computed stays committed and cached."""
        groups = dict.fromkeys(self._queue.sequence(work.sequence).group for work in plan.work)
        for group in groups:
            self._endings.fail(group, Failure.STEP, detail)
