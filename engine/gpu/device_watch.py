"""Tells the failure of a step from the loss of its device.

CUDA keeps some errors for the rest of a process: after an illegal address, a failed assertion or broken memory every
later call returns the same one. Their names say little, as torch, cuBLAS and Triton each have their own. So after any
failure the device is asked once more: one that is out of memory answers, one that is lost does not.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from engine.errors import DeviceLost, EngineBroken
from engine.schedule.step_plan import Launched, Runner, Sampled, StepPlan

Check = Callable[[], None]


def check_of(device: torch.device) -> Check:
    """Return what raises as long as the device fails whatever it is asked for: a wait for all that it was given.

    On a CPU it does nothing.
    """
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


@contextmanager
def watched(check: Check) -> Iterator[None]:
    """Let what fails fail, as DeviceLost where the check fails too."""
    try:
        yield
    except EngineBroken:
        raise
    except Exception as failure:
        _ask(check, failure)
        raise


def _ask(check: Check, failure: Exception) -> None:
    try:
        check()
    except Exception as lasting:
        raise DeviceLost(f"the device is lost: {failure}; and to whatever it is asked now: {lasting}") from failure


@dataclass(frozen=True)
class _Watched:
    launched: Launched
    check: Check

    def result(self) -> list[Sampled]:
        with watched(self.check):
            results = self.launched.result()
        # What a model's kernels did wrong shows where the device is waited for first, be it in one request's sampling.
        if fault := next((one.fault for one in results if one.fault is not None), None):
            _ask(self.check, fault)
        return results

    def sample_seconds(self) -> float:
        with watched(self.check):
            return self.launched.sample_seconds()


class WatchedRunner:
    """A runner whose failures are DeviceLost where its device is."""

    def __init__(self, runner: Runner, check: Check) -> None:
        """`check` is of the device that the runner uses."""
        self._runner = runner
        self._check = check

    def launch(self, plan: StepPlan) -> Launched:
        """Begin a step. Raises what the runner raises, and DeviceLost, as its end does."""
        with watched(self._check):
            return _Watched(self._runner.launch(plan), self._check)
