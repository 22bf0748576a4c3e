"""`python -m tests.running.slow_engine engine ...` is `quire engine` in which requests of one seed are slow.

A step that computes such a request takes 20 ms more, so that a request of many tokens still runs when a test acts on
it, however fast the machine. `serve` instead of `engine` starts such engines.
"""

import asyncio
import sys
import time
from typing import TYPE_CHECKING, Any

from services.cli.main import main

if TYPE_CHECKING:  # because `serve` does without torch
    from engine.run.runner import ModelRunner
    from engine.schedule.step_plan import Launched, StepPlan

_SECONDS = 0.02

_create_subprocess = asyncio.create_subprocess_exec


def slow_down() -> None:
    """Make requests of SLOW_SEED slow in this process."""
    from engine.run.runner import ModelRunner
    from tests.load import SLOW_SEED

    original = ModelRunner.launch

    def launch(self: "ModelRunner", plan: "StepPlan") -> "Launched":
        if any(work.sampling.seed == SLOW_SEED for work in plan.work):
            time.sleep(_SECONDS)
        return original(self, plan)

    ModelRunner.launch = launch  # type: ignore[method-assign]


async def _create_slow_engine(program: str, *arguments: str, **options: Any) -> Any:
    safe_path, flag, module, command, *rest = arguments
    # The safe path does not have the current folder with this module.
    own = (flag, "tests.running.slow_engine") if command == "engine" else (safe_path, flag, module)
    return await _create_subprocess(program, *own, command, *rest, **options)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        asyncio.create_subprocess_exec = _create_slow_engine  # type: ignore[assignment]
    else:
        slow_down()
    main()
