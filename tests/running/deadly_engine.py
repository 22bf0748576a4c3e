"""`python -m tests.running.deadly_engine engine ...` is `quire engine` that dies of requests of one seed.

The first step that computes a token of such a request kills the process, as a fault of a kernel or of a driver would.
Requests of SLOW_SEED are slow. A file beside the socket can also order to kill a process in the middle of a step, see
`order`.
"""

import os
import signal
import sys
from pathlib import Path

from engine.run.runner import ModelRunner
from engine.schedule.step_plan import Launched, StepPlan
from services.cli.main import main
from tests.running.slow_engine import slow_down

DEADLY_SEED = 666

SWAP = "swap"
ANY_STEP = "any"

_launch = ModelRunner.launch


def order(address: str, pid: int, moment: str, count: int) -> None:
    """Let an engine kill a process in the middle of a step, the next but `count` that swaps blocks or of any kind.

    The other ranks have received the plan of that step, and rank 0 has not launched it.
    """
    written = _file(address).with_suffix(".writing")
    written.write_text(f"{pid} {moment} {count}")
    written.rename(_file(address))


def ordered(address: str) -> bool:
    """Whether an order has not been obeyed."""
    return _file(address).exists()


def _file(address: str) -> Path:
    return Path(address.removeprefix("unix:")).with_suffix(".order")


def _obey(file: Path, plan: StepPlan) -> None:
    if not file.exists():
        return
    pid, moment, count = file.read_text().split()
    if moment == SWAP and not any(copies.device_to_host or copies.host_to_device for copies in plan.copies):
        return
    if int(count):
        file.write_text(f"{pid} {moment} {int(count) - 1}")
    else:
        file.unlink()
        os.kill(int(pid), signal.SIGKILL)


def launch(self: ModelRunner, plan: StepPlan) -> Launched:
    if any(work.sampling.seed == DEADLY_SEED for work in plan.work):
        os.kill(os.getpid(), signal.SIGKILL)
    if "--listen" in sys.argv:
        _obey(_file(sys.argv[sys.argv.index("--listen") + 1]), plan)
    return _launch(self, plan)


if __name__ == "__main__":
    ModelRunner.launch = launch  # type: ignore[method-assign]
    slow_down()
    main()
