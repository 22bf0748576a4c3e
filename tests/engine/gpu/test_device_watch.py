"""Failed steps, which the engine survives, and a lost device, which ends it."""

from collections.abc import Callable

import pytest
import torch

from engine.errors import CopyFailed, DeviceLost
from engine.gpu.device_watch import WatchedRunner, check_of, watched
from engine.run.loop import Engine
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.outputs import Finished, Output
from engine.schedule.request import Failure, Request, Stopping
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Done, Launched, Sampled, StepPlan
from simulation.runner import FailedLater
from tests.engine_in_process import GREEDY
from tests.in_process import InProcessBlocks

ILLEGAL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
PLACES = ["launch", "end", "one request's sampling"]


class Device:
    """A device that may be lost at the launch or during a step, or fail without being lost."""

    def __init__(self, failure: Exception | None = None, *, at: str = "launch", lost: bool = False) -> None:
        self.failure, self._at, self._lost = failure, at, lost

    def launch(self, plan: StepPlan) -> Launched:
        if self.failure is None:
            return Done([Sampled(1) for work in plan.work if work.samples])
        if self._at == "launch":
            raise self.failure
        if self._at == "end":
            return FailedLater(self.failure)
        return Done([Sampled(0, fault=self.failure) for work in plan.work if work.samples])

    def check(self) -> None:
        if self._lost:
            raise ILLEGAL


def turns(device: Device) -> tuple[Engine, Callable[[], list[Output]]]:
    scheduler = Scheduler(Capacity(8, 50, 4, 8), Limits(8, 4, 4))
    engine = Engine(scheduler, WatchedRunner(device, device.check), InProcessBlocks(scheduler.capacity), lambda: 0.0)
    scheduler.requests.submit(Request("one", (1, 2, 3), GREEDY, Stopping(2)))
    engine.turn()  # requests blocks
    return engine, lambda: engine.turn().outputs


def ends(outputs: list[Output]) -> list[Failure | None]:
    return [output.group.failure for output in outputs if isinstance(output, Finished)]


@pytest.mark.parametrize("at", PLACES)
def test_a_lost_device_ends_the_loop_and_fails_no_request(at: str) -> None:
    # The first error may be a library's and not name the device.
    engine, turn = turns(Device(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), at=at, lost=True))
    with pytest.raises(DeviceLost, match=r"CUBLAS_STATUS_EXECUTION_FAILED; .* an illegal memory access"):
        turn()
    assert engine.last_failure is None
    assert ends(engine.scheduler.take_outputs()) == []


@pytest.mark.parametrize("at", PLACES)
def test_a_responding_device_is_not_lost_and_the_next_request_is_served(at: str) -> None:
    device = Device(torch.OutOfMemoryError("CUDA out of memory"), at=at)
    engine, turn = turns(device)
    assert ends(turn()) == [Failure.REQUEST if at == "one request's sampling" else Failure.STEP]
    device.failure = None
    engine.scheduler.requests.submit(Request("two", (1, 2, 3), GREEDY, Stopping(2)))
    assert ends([output for _ in range(6) for output in turn()]) == [None]


def test_an_error_that_ends_the_engine_is_raised_unchanged() -> None:
    device = Device(lost=True)
    with pytest.raises(CopyFailed), watched(device.check):
        raise CopyFailed("a copy of blocks failed")


def test_a_cpu_is_never_lost() -> None:
    check_of(torch.device("cpu"))()
