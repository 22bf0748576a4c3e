"""Distinguishes a failed step from a lost device.

CUDA keeps some errors for the rest of a process: after an illegal address, a failed assertion or an uncorrectable
memory error every later call returns the same error. Error types do not show it, because torch, cuBLAS and Triton each
have their own. So after any failure the device is checked: a device out of memory passes, a lost device fails.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from engine.errors import DeviceLost, EngineBroken
from engine.schedule.step_plan import Launched, Runner, Sampled, StepPlan

Check = Callable[[], None]


def check_of(device: torch.device) -> Check:
    """Return a function that raises while the device fails every call: it synchronizes with the device.

    On a CPU it does nothing.
    """
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


class _Watch:
    # No generator, because a step enters three of them.

    def __init__(self, check: Check) -> None:
        self._check = check

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        if isinstance(failure, Exception) and not isinstance(failure, EngineBroken):
            _check_device(self._check, failure)


def watched(check: Check) -> AbstractContextManager[None]:
    """Reraise exceptions, as DeviceLost if the check fails too."""
    return _Watch(check)


def _check_device(check: Check, failure: Exception) -> None:
    try:
        check()
    except Exception as lasting:
        raise DeviceLost(f"the device is lost: {failure}; every further call fails: {lasting}") from failure


@dataclass(frozen=True)
class _Watched:
    launched: Launched
    check: Check

    def result(self) -> list[Sampled]:
        with watched(self.check):
            results = self.launched.result()
        # A kernel's error appears at the next synchronization, which may be in the sampling of one request.
        if fault := next((one.fault for one in results if one.fault is not None), None):
            _check_device(self.check, fault)
        return results

    def sample_seconds(self) -> float:
        with watched(self.check):
            return self.launched.sample_seconds()


class WatchedRunner:
    """A runner whose failures become DeviceLost if its device is lost."""

    def __init__(self, runner: Runner, check: Check) -> None:
        """`check` is that of the runner's device."""
        self._runner = runner
        self._check = check

    def launch(self, plan: StepPlan) -> Launched:
        """Launch a step. Raises the runner's exceptions, or DeviceLost, as does its result."""
        with watched(self._check):
            return _Watched(self._runner.launch(plan), self._check)
