"""The engine's loop: plan, launch, publish, with the block manager asked while the step runs.

Where the scheduler plans ahead, the next step is launched behind the one under way before that has brought its tokens,
so that the device has always something to do. What it computes for a sequence that turns out to have ended is dropped.
The blocks of such a sequence are given back only then, and whatever is launched later runs after what was launched
before: nobody else's contents can be overwritten.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from blocks import BlockManager, Reattached
from engine.errors import EngineBroken
from engine.schedule.outputs import Output
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Launched, Runner, Sampled, StepPlan


class StepTimes(NamedTuple):
    """Where the time of a step went, in seconds.

    `ran` is from its launch, or from the end of the step before it, until its tokens were there; `sample` is the part
    of that which its sampling took. `plan` went into laying out steps and asking for blocks since the last step ended,
    and `publish` into taking in what this one brought. Where the next step is launched ahead, it runs during both.
    """

    ran: float
    plan: float
    sample: float
    publish: float

    @property
    def forward(self) -> float:
        """What is neither of these: copies and the model."""
        return max(0.0, self.ran - self.sample)


@dataclass(frozen=True)
class Turn:
    """What one turn of the loop brought: outputs, and whether anything moved; if not, the loop may sleep.

    `step` says where the time of the step went that ended in it, None if none did.
    """

    outputs: list[Output]
    progressed: bool
    step: StepTimes | None = None


@dataclass(frozen=True)
class _Failed:
    """A step that could not be launched."""

    failure: Exception

    def result(self) -> list[Sampled]:
        raise self.failure

    def sample_seconds(self) -> float:
        return 0.0


@dataclass(frozen=True)
class _Flight:
    """A step that was launched, as it was planned then."""

    plan: StepPlan
    launched: Launched
    begun: float


class Engine:
    """Turns requests into tokens. One thread calls it; whoever owns that thread waits when a turn made no progress."""

    def __init__(self, scheduler: Scheduler, runner: Runner, blocks: BlockManager, clock: Callable[[], float]) -> None:
        """Put the parts together. `clock` gives seconds, never going back."""
        self.scheduler = scheduler
        self.blocks = blocks
        self.last_failure: Exception | None = None
        self._runner = runner
        self._clock = clock
        self._ahead: _Flight | None = None  # the next step, where it was launched already
        self._ended = -inf  # when the latest step did
        self._planning = 0.0  # seconds spent on it since then

    def turn(self) -> Turn:
        """Take in answers, end at most one step, and ask for what the next one needs.

        Raises EngineBroken: then it cannot go on.
        """
        begun = self._clock()
        answered = self._receive()
        flight, plan = self._begin(begun)
        step = self.scheduler.build_step(plan) if self.blocks.ready else None
        if step is not None:
            self.blocks.send(step)
        self._planning += self._clock() - begun
        if plan is not None and flight is None:
            flight = self._launch(plan)
        times = None
        if plan is not None and flight is not None:
            self._launch_ahead(plan, flight)
            times = self._end(flight, plan)
        outputs = self.scheduler.take_outputs()
        return Turn(outputs, bool(answered or plan or step or outputs), times)

    def take_failure(self) -> Exception | None:
        """Return what made the latest step that failed fail, and forget it."""
        failure, self.last_failure = self.last_failure, None
        return failure

    def _receive(self) -> int:
        answered = 0
        try:
            while (result := self.blocks.receive()) is not None:
                self.scheduler.apply(result)
                answered += 1
        except Reattached as reattached:
            self.scheduler.rollback_step(reattached.available_blocks, reattached.available_host_blocks, reattached.pins)
            answered += 1  # answers may be there already: the loop must not sleep before it has looked
        return answered

    def _begin(self, now: float) -> tuple[_Flight | None, StepPlan | None]:
        """Return the step that was launched ahead and what is left of its plan, or the plan of a new step."""
        flight, self._ahead = self._ahead, None
        return flight, self.scheduler.adopt(flight.plan, now) if flight else self.scheduler.plan(now)

    def _launch(self, plan: StepPlan) -> _Flight:
        """Launch a step; a failure is kept until its end. Raises EngineBroken."""
        begun = self._clock()
        try:
            return _Flight(plan, self._runner.launch(plan), begun)
        except EngineBroken:
            raise
        except Exception as failure:
            return _Flight(plan, _Failed(failure), begun)

    def _launch_ahead(self, plan: StepPlan, flight: _Flight) -> None:
        if isinstance(flight.launched, _Failed):
            return
        begun = self._clock()
        ahead = self.scheduler.plan_ahead(plan)
        self._planning += self._clock() - begun
        if ahead is not None:
            self._ahead = self._launch(ahead)

    def _end(self, flight: _Flight, plan: StepPlan) -> StepTimes:
        """Publish what a step brought for what is left of its plan; return where its time went.

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
            self.scheduler.publish(plan, _kept(flight.plan, plan, results), self._ended)
            self.scheduler.costs.observe(flight.plan, ran)
        planning, self._planning = self._planning, 0.0
        return StepTimes(ran, planning, sampling, self._clock() - self._ended)

    def _seconds(self, flight: _Flight) -> float:
        """Return how long a step ran: it began when it was launched, or when the one before it had ended."""
        begun, self._ended = max(flight.begun, self._ended), self._clock()
        return self._ended - begun


def _kept(launched: StepPlan, adopted: StepPlan, results: list[Sampled]) -> list[Sampled]:
    """Return of what a step brought that for the work that was adopted."""
    if launched is adopted:
        return results
    adopted_ids, sampled = {work.sequence for work in adopted.work}, iter(results)
    kept: list[Sampled] = []
    for work in launched.work:
        outcomes = [next(sampled) for _ in range(work.outcomes)]
        if work.sequence in adopted_ids:
            kept += outcomes
    return kept
