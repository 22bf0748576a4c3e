"""`python -m tests.running.engine_that_loses_its_device engine ...` is `quire engine` whose device is lost at a step.

From then on every use of the device fails, as CUDA does after an illegal address.
"""

import torch

from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Launched, StepPlan
from services.cli.main import main
from services.engine.startup import assembly

LAST_STEP = 40
MESSAGE = "CUDA error: an illegal memory access was encountered"


class LosingRunner(ModelRunner):
    launches = 0

    def launch(self, plan: StepPlan) -> Launched:
        LosingRunner.launches += 1
        _use_device()
        return super().launch(plan)


def _use_device() -> None:
    if LosingRunner.launches > LAST_STEP:
        raise torch.AcceleratorError(MESSAGE)


if __name__ == "__main__":
    assembly.ModelRunner = LosingRunner  # type: ignore[misc]
    assembly.check_of = lambda device: _use_device
    main()
