"""`python -m tests.running.deadly_engine engine ...` is `quire engine` that dies of requests of one seed.

The first step that computes a token of such a request kills the process, as a fault of a kernel or of a driver would.
Requests of SLOW_SEED are slow.
"""

import os
import signal

from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Launched, StepPlan
from services.cli.main import main
from tests.running.slow_engine import slow_down

DEADLY_SEED = 666

_launch = ModelRunner.launch


def launch(self: ModelRunner, plan: StepPlan) -> Launched:
    if any(work.sampling.seed == DEADLY_SEED for work in plan.work):
        os.kill(os.getpid(), signal.SIGKILL)
    return _launch(self, plan)


if __name__ == "__main__":
    ModelRunner.launch = launch  # type: ignore[method-assign]
    slow_down()
    main()
