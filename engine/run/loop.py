"""The engine's loop: plan, launch, publish; the block manager answers while the step runs.

If the scheduler plans ahead, the next step is launched before the step in flight has returned its tokens, so that the
device never idles. Results for a sequence that turns out to have ended are discarded. Its blocks are released only
then, and later launches run after earlier ones, so no other sequence's contents are overwritten.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from blocks import BlockManager, Reattached
from engine.errors import EngineBroken
from engine.schedule.outputs import Output
from engine.schedule.pool.condemnations import Proof
from engine.schedule.scheduler import IdleReason, Scheduler
from engine.schedule.step_plan import Launched, Runner, Sampled, StepPlan


class StepTimes(NamedTuple):
    """Durations of one step, in seconds.

    `ran`: from its launch, or the end of the step before it, until its tokens arrived; `sample`: the part spent
    sampling. `plan`: planning and block requests since the last step ended, and copies that are made and compared
    before the next plan; `publish`: processing of its results. A step launched ahead runs during both.
    """

    ran: float
    plan: float
    sample: float
    publish: float

    @property
    def forward(self) -> float:
        """Time of copies and the model: `ran` without `sample`."""
        return max(0.0, self.ran - self.sample)


@dataclass(frozen=True)
class Turn:
    """Result of one turn of the loop: outputs, and whether there was progress.

    `step` has the durations of the step that ended, None if none did. `idle` is the reason why the next turn can do
    nothing. Without one the loop must turn again, even if this turn made no progress.
    """

    outputs: list[Output]
    progressed: bool
    step: StepTimes | None = None
    idle: IdleReason | None = None


@dataclass(frozen=True)
class _Failed:
    """A step that could not be launched."""

    failure: Exception

    def result(self) -> list[Sampled]:
        raise self.failure

    def sample_seconds(self) -> float:
        return 0.0


@dataclass(frozen=True)
class _LaunchedStep:
    """A launched step, with its plan at that time."""

    plan: StepPlan
    launched: Launched
    started: float


class Engine:
    """Turns requests into tokens. Called by one thread, which waits after a turn that gives a reason to."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        blocks: BlockManager,
        clock: Callable[[], float],
        proof: Proof | None = None,
    ) -> None:
        """`clock` returns monotonic seconds. With `proof`, it makes the copies of answers before the next plan."""
        if proof is not None:
            scheduler.prove_with(proof)
        self.scheduler = scheduler
        self.blocks = blocks
        self.last_failure: Exception | None = None
        self._runner = runner
        self._clock = clock
        self._on_launch: Callable[[], None] | None = None
        self._ahead: _LaunchedStep | None = None  # the next step, if it was launched ahead
        self._ended = -inf  # end of the latest step
        self._planning = 0.0  # seconds spent planning since then

    def on_launch(self, launching: Callable[[], None]) -> None:
        """Call `launching` in each turn that executes a step: after the planning, while requests wait for the step."""
        self._on_launch = launching

    def turn(self) -> Turn:
        """Apply results, end at most one step, and request blocks for the next one.

        Raises EngineBroken if the engine cannot continue.
        """
        started = self._clock()
        answered = self._receive()
        flight, plan = self._begin(started)
        step = self.scheduler.build_step(plan) if self.blocks.ready else None
        if step is not None:
            self.blocks.send(step)
        self._planning += self._clock() - started
        if plan is not None and self._on_launch is not None:
            self._on_launch()
        if plan is not None and flight is None:
            flight = self._launch(plan)
        times = None
        if plan is not None and flight is not None:
            self._launch_ahead(plan, flight)
            times = self._end(flight, plan)
        outputs = self.scheduler.take_outputs()
        progressed = bool(answered or plan or step or outputs)
        return Turn(outputs, progressed, times, None if progressed else self._idle_reason())

    def _idle_reason(self) -> IdleReason | None:
        return self.scheduler.idle_reason(connected=self.blocks.ready)

    def take_failure(self) -> Exception | None:
        """Return and clear the exception of the latest failed step."""
        failure, self.last_failure = self.last_failure, None
        return failure

    def _receive(self) -> int:
        answered = 0
        try:
            while (result := self.blocks.receive()) is not None:
                self.scheduler.apply(result)
                answered += 1
        except Reattached as reattached:
            self.scheduler.rollback_step(reattached)
            answered += 1  # results may have arrived: the loop must not sleep before the next receive
        return answered

    def _begin(self, now: float) -> tuple[_LaunchedStep | None, StepPlan | None]:
        """Return the step launched ahead and the valid part of its plan, or the plan of a new step."""
        flight, self._ahead = self._ahead, None
        return flight, self.scheduler.adopt(flight.plan, now) if flight else self.scheduler.plan(now)

    def _launch(self, plan: StepPlan) -> _LaunchedStep:
        """Launch a step. A failure is raised by its `result`, except EngineBroken."""
        started = self._clock()
        try:
            return _LaunchedStep(plan, self._runner.launch(plan), started)
        except EngineBroken:
            raise
        except Exception as failure:
            return _LaunchedStep(plan, _Failed(failure), started)

    def _launch_ahead(self, plan: StepPlan, flight: _LaunchedStep) -> None:
        if isinstance(flight.launched, _Failed):
            return
        started = self._clock()
        ahead = self.scheduler.plan_ahead(plan)
        self._planning += self._clock() - started
        if ahead is not None:
            self._ahead = self._launch(ahead)

    def _end(self, flight: _LaunchedStep, plan: StepPlan) -> StepTimes:
        """Publish the results for the valid part of a plan; return the durations.

        Raises EngineBroken.
        """
        sampling = 0.0
        try:
            results = flight.launched.result()
            sampling = flight.launched.sample_seconds()
        except EngineBroken:
            raise
        except Exception as failure:
            self.last_failure = failure
            ran = self._seconds(flight)
            self.scheduler.fail(plan, f"step {plan.step} failed: {failure}")
        else:
            ran = self._seconds(flight)
            self.scheduler.publish(plan, _adopted_results(flight.plan, plan, results), self._ended)
            self.scheduler.observe(flight.plan, ran)
        planning, self._planning = self._planning, 0.0
        return StepTimes(ran, planning, sampling, self._clock() - self._ended)

    def _seconds(self, flight: _LaunchedStep) -> float:
        """Return how long a step ran, from its launch or the end of the step before it."""
        started, self._ended = max(flight.started, self._ended), self._clock()
        return self._ended - started


def _adopted_results(launched: StepPlan, adopted: StepPlan, results: list[Sampled]) -> list[Sampled]:
    """Return the results of the adopted work."""
    if launched is adopted:
        return results
    adopted_ids, sampled = {work.sequence for work in adopted.work}, iter(results)
    kept: list[Sampled] = []
    for work in launched.work:
        outcomes = [next(sampled) for _ in range(work.outcomes)]
        if work.sequence in adopted_ids:
            kept += outcomes
    return kept
