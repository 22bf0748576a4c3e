"""The part `start` of `make gpu-check`: failures of a stage, and steps that compute something else."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu_check.notes import Notes
from bench.gpu_check.starting.stages import Assembly, Stages
from bench.gpu_check.starting.steps import FirstSteps, check_alike, replayed
from engine.schedule.limits import Limits
from engine.schedule.step_plan import Sampled, StepPlan
from tests.engine.simulated_gpu import GPU, simulated_gpu
from tests.engine_in_process import ModelEngine

log = logging.getLogger("quire.engine")


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with simulated_gpu(1 << 30):
        yield


@pytest.fixture
def written() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def stages(written: io.StringIO) -> Stages:
    return Stages("start", Notes(written), GPU)


def failures(written: io.StringIO) -> dict[str, str]:
    lines = map(json.loads, written.getvalue().splitlines())
    return dict(line["failure"] for line in lines if "failure" in line)


def metrics(written: io.StringIO) -> set[str]:
    lines = map(json.loads, written.getvalue().splitlines())
    return {line["row"]["metric"] for line in lines if "row" in line}


def test_a_failed_stage_costs_those_that_need_it_and_no_others(stages: Stages, written: io.StringIO) -> None:
    stages.run("decode", lambda: 1 // 0)
    stages.run("mixed", lambda: None, ("decode",))
    stages.run("swap", lambda: None, ("mixed",))
    stages.run("replay", lambda: None)
    assert failures(written) == {
        "start, decode": "ZeroDivisionError: integer division or modulo by zero",
        "start, mixed": "AssertionError: not run, because decode failed",
        "start, swap": "AssertionError: not run, because mixed failed",
    }
    assert metrics(written) == {"start_replay_seconds", "start_free_after_replay_mib"}


def test_the_failure_of_an_assembly_is_that_of_its_stage(stages: Stages, written: io.StringIO) -> None:
    def assemble() -> None:
        log.info("loading", extra={"stage": "loading"})
        log.info("allocating", extra={"stage": "pool"})
        raise torch.OutOfMemoryError("no memory for the pool")

    assembly = Assembly(GPU)
    assert assembly.run(assemble) is None
    stages.take(assembly, ("loading", "pool", "recording"))
    stages.run("decode", lambda: None, ("recording",))
    assert failures(written) == {
        "start, pool": "OutOfMemoryError: no memory for the pool",
        "start, recording": "AssertionError: not run, because pool failed",
        "start, decode": "AssertionError: not run, because recording failed",
    }
    assert {"start_settings_seconds", "start_loading_seconds"} < metrics(written)


def test_a_warning_of_an_assembly_is_a_failure_of_its_stage_that_costs_nothing(
    stages: Stages, written: io.StringIO
) -> None:
    def assemble() -> int:
        log.info("recording", extra={"stage": "recording"})
        log.warning("steps are launched anew")
        log.info("ready", extra={"stage": "ready"})
        return 7

    assembly = Assembly(GPU)
    assert assembly.run(assemble) == 7
    stages.take(assembly, ("recording", "ready"))
    stages.run("decode", lambda: None, ("ready",))
    assert failures(written) == {"start, recording": "AssertionError: steps are launched anew"}
    assert {"start_recording_seconds", "start_decode_seconds"} < metrics(written)


class Parts:
    """An engine in float32 on the CPU, as parts."""

    def __init__(self, folder: Path) -> None:
        self.engine = ModelEngine(folder, device_blocks=32, host_blocks=16, block_size=4, token_budget=40)
        self.backend: Any = self.engine.backend
        self.scheduler, self.runner, self.loaded = self.engine.scheduler, self.engine.engine._runner, self.engine.loaded
        self.device, self.ranks = "cpu", None

    def steps(self) -> FirstSteps:
        return FirstSteps(self, Limits(40, 4), (9, 5))


@pytest.fixture
def parts(tiny_model: Callable[[str], Path]) -> Parts:
    return Parts(tiny_model("llama"))


def run_all(steps: FirstSteps) -> None:
    for step in (steps.prefill, steps.decode, steps.mixed, steps.swap_out, steps.swap_in, steps.largest):
        step()


def test_an_engine_computes_the_same_on_two_ways(parts: Parts) -> None:
    run_all(parts.steps())
    assert replayed(parts, 9, 6) == 3


@pytest.mark.parametrize("direction", ["swap_out", "swap_in"])
def test_a_swap_that_copies_nothing_is_found(parts: Parts, direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swap = parts.backend.swap
    wanted = {"swap_out": "DEVICE_TO_HOST", "swap_in": "HOST_TO_DEVICE"}[direction]
    monkeypatch.setattr(parts.backend, "swap", lambda copies, way: None if way.name == wanted else swap(copies, way))
    with pytest.raises(AssertionError, match="of the most likely tokens are the same"):
        run_all(parts.steps())


class Forgetful:
    """A runner that loses the cache once it has run some steps."""

    def __init__(self, parts: Parts, after: int) -> None:
        self._runner, self._cache, self._after = parts.runner, parts.backend.cache, after

    def launch(self, plan: StepPlan) -> Any:
        self._after -= 1
        if not self._after:
            self._cache.zero_()
        return self._runner.launch(plan)


def test_a_resumed_request_that_continues_otherwise_is_found(parts: Parts) -> None:
    parts.runner = Forgetful(parts, 8)  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="of the most likely tokens are the same"):
        replayed(parts, 9, 6)


def test_a_failure_of_sampling_is_found() -> None:
    found = Sampled(0, fault=RuntimeError("no kernel image"))
    with pytest.raises(AssertionError, match="sampling failed: no kernel image"):
        check_alike(found, Sampled(0, top=((0, 0.0),)))


def test_the_largest_step_must_be_sampled(parts: Parts) -> None:
    results = [Sampled(0, fault=torch.OutOfMemoryError("no memory for candidates"))]
    parts.runner = SimpleNamespace(launch=lambda _: SimpleNamespace(result=lambda: results))  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="sampling failed: no memory for candidates"):
        parts.steps().largest()
