"""`python -m tests.running.slow_engine engine ...` is `quire engine` in which requests of one seed are slow.

A step that computes such a request takes 20 ms more, so that a request of many tokens still runs whatever a test does
to it, however fast the machine. `serve` instead of `engine` starts such engines.
"""

import asyncio
import sys
import time
from typing import Any

from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Launched, StepPlan
from services.cli.main import main
from tests.load import SLOW_SEED

_SECONDS = 0.02

_launch = ModelRunner.launch
_create_subprocess = asyncio.create_subprocess_exec


def launch(self: ModelRunner, plan: StepPlan) -> Launched:
    if any(work.sampling.seed == SLOW_SEED for work in plan.work):
        time.sleep(_SECONDS)
    return _launch(self, plan)


async def _create_slow_engine(program: str, flag: str, module: str, command: str, *rest: str, **options: Any) -> Any:
    own = "tests.running.slow_engine" if command == "engine" else module
    return await _create_subprocess(program, flag, own, command, *rest, **options)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.create_subprocess_exec = _create_slow_engine  # type: ignore[assignment]
    else:
        ModelRunner.launch = launch  # type: ignore[method-assign]
    main()
