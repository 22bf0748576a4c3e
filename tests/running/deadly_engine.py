"""`python -m tests.running.deadly_engine engine ...` is `quire engine` with a bug that requests of one seed meet.

The first step that computes a token of such a request kills the process, as a fault of a kernel or of a driver would.
"""

import os
import signal

from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Launched, StepPlan
from services.cli.main import main

DEADLY_SEED = 666

_launch = ModelRunner.launch


def _launched(self: ModelRunner, plan: StepPlan) -> Launched:
    if any(work.sampling.seed == DEADLY_SEED for work in plan.work):
        os.kill(os.getpid(), signal.SIGKILL)
    return _launch(self, plan)


if __name__ == "__main__":
    ModelRunner.launch = _launched  # type: ignore[method-assign]
    main()
