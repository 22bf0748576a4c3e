"""Rank 0's runner: sends each plan to the other ranks, then launches it."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import EngineBroken, RankFailed
from engine.parallel.plan_message import PlanEncoder
from engine.schedule.step_plan import Launched, Runner, Sampled, StepPlan


class LeadingRunner:
    """Sends a plan before its own inputs are built, so that all ranks begin at the same time.

    The ranks of a step that fails at one of them are no longer in the same place, so any failure ends the engine; one
    that belongs to a single request is no failure of the step.
    """

    def __init__(self, runner: Runner, send: Callable[[bytes], None], *, ahead: bool = False) -> None:
        """`send` sends a message to every other rank, and raises RankFailed.

        With `ahead`, the runner shares the sampled tokens, because the next plan is sent before they are known.
        """
        self._runner = runner
        self._send = send
        self._ahead = ahead
        self._encoder = PlanEncoder()

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step on all ranks. Raises RankFailed, as does its result, and the runner's EngineBroken."""
        shares_tokens = self._ahead and bool(plan.work)
        self._send(self._encoder.encode(plan, shares_tokens=shares_tokens))
        try:
            return _Led(plan.step, self._runner.launch(plan))
        except EngineBroken:
            raise
        except Exception as failure:
            raise RankFailed(f"rank 0 failed in step {plan.step}: {failure}") from failure


@dataclass(frozen=True)
class _Led:
    step: int
    launched: Launched

    def result(self) -> list[Sampled]:
        try:
            return self.launched.result()
        except EngineBroken:
            raise
        except Exception as failure:
            raise RankFailed(f"rank 0 failed in step {self.step}: {failure}") from failure

    def sample_seconds(self) -> float:
        return self.launched.sample_seconds()
