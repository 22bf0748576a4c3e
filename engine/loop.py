"""The engine's loop: plan, execute, publish, with the block manager asked while the step runs."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.blocks import BlockManager, Reattached
from engine.errors import CopyFailed
from engine.plan import Runner, StepPlan
from engine.scheduler import Output, Scheduler


@dataclass(frozen=True)
class Turn:
    """What one turn of the loop brought: outputs, and whether anything moved; if not, the loop may sleep.

    `step_seconds` is how long the step took that it executed, None if it executed none.
    """

    outputs: list[Output]
    progressed: bool
    step_seconds: float | None = None


class Engine:
    """Turns requests into tokens. One thread calls it; whoever owns that thread waits when a turn made no progress."""

    def __init__(self, scheduler: Scheduler, runner: Runner, blocks: BlockManager, clock: Callable[[], float]) -> None:
        """Put the parts together. `clock` gives seconds, never going back."""
        self.scheduler = scheduler
        self.blocks = blocks
        self.last_failure: Exception | None = None
        self._runner = runner
        self._clock = clock

    def turn(self) -> Turn:
        """Take in answers, run at most one step, and ask for what the next one needs.

        Raises BlockManagerBroken or CopyFailed; then the engine cannot go on.
        """
        answered = self._receive()
        plan = self.scheduler.plan(self._clock())
        step = self.scheduler.ask(plan) if self.blocks.ready else None
        if step is not None:
            self.blocks.send(step)
        seconds = None if plan is None else self._execute(plan)
        outputs = self.scheduler.take_outputs()
        return Turn(outputs, bool(answered or plan or step or outputs), seconds)

    def _receive(self) -> int:
        answered = 0
        try:
            while (result := self.blocks.receive()) is not None:
                self.scheduler.apply(result)
                answered += 1
        except Reattached as reattached:
            self.scheduler.undo_asked(reattached.available_blocks, reattached.available_host_blocks, reattached.pins)
            answered += 1  # answers may be there already: the loop must not sleep before it has looked
        return answered

    def _execute(self, plan: StepPlan) -> float:
        """Run a step and publish what it brought; return how many seconds it ran. Raises CopyFailed."""
        begun = self._clock()
        try:
            brought = self._runner.execute(plan)
        except CopyFailed:
            raise
        except Exception as failure:
            self.last_failure = failure
            self.scheduler.fail(plan, f"step {plan.step} failed: {failure}")
            return self._clock() - begun
        ended = self._clock()
        self.scheduler.publish(plan, brought, ended)
        self.scheduler.costs.observe(plan, ended - begun)
        return ended - begun
