"""The pool of a GPU is measured after the largest step, and has the blocks that `quire plan` computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.attention import TorchBackend
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.model.memory_plan import Planner, Workload
from engine.model.model_shape import read_shape
from engine.model.sizing import cache_bytes
from engine.run.runner import ModelRunner
from engine.run.samplers import TorchSampler
from engine.run.sampling import Draw
from engine.schedule.capacity import Capacity
from engine.schedule.step_plan import StepPlan
from services.engine.settings import EngineSettings
from services.engine.startup.backends import BackendOptions, choose_backend
from services.engine.startup.device import capacity_of
from services.engine.startup.gpu_pool import PoolMeasurement, largest_step, run_sampled
from services.runtime.settings import InvalidSetting

CPU, GIB = torch.device("cpu"), 1 << 30
SETTINGS = EngineSettings(block_size=16, token_budget=70, max_sequences=5).for_device(on_gpu=True)


@dataclass
class FakeGpu:
    """A GPU that counts what is on it, and records the order of calls."""

    total: int
    used: int = 0
    events: list[str] = field(default_factory=list)

    def free_and_total(self) -> tuple[int, int]:
        self.events.append("read free memory")
        return self.total - self.used, self.total

    def empty_cache(self) -> None:
        self.events.append("empty the cache")

    def synchronize(self) -> None:
        self.events.append("wait")


@pytest.fixture
def loaded(tiny_model: Callable[[str], Path]) -> LoadedModel:
    return load_model(tiny_model("llama"), torch.bfloat16, CPU)


def planned_bytes(folder: Path) -> Planner:
    workload = Workload(16, SETTINGS.token_budget, 2048, SETTINGS.max_sequences)
    return Planner(read_shape(folder, torch.bfloat16), torch.bfloat16, workload, on_gpu=True)


@pytest.mark.parametrize("utilization", [0.9, 0.5, 0.985, 1.0])
def test_the_engine_has_the_planned_blocks_if_weights_and_step_take_the_planned_memory(
    loaded: LoadedModel, utilization: float
) -> None:
    assert loaded.folder
    plan = planned_bytes(loaded.folder).for_memory(GIB, utilization, 0)
    gpu = FakeGpu(GIB)
    measurement = PoolMeasurement(gpu)
    capacity = capacity_of(SETTINGS, loaded)
    gpu.used += plan.weights_bytes + cache_bytes(capacity.device_blocks, plan.block_bytes)
    settings = EngineSettings(gpu_memory_utilization=utilization, block_size=16, token_budget=70, max_sequences=5)

    def run(_plan: StepPlan) -> None:
        gpu.events.append("step")
        gpu.used += plan.step_bytes

    assert measurement.blocks(run, settings, loaded, capacity) == plan.device_blocks
    assert gpu.events == ["read free memory", "empty the cache", "step", "wait", "read free memory"]


def test_the_cache_is_replaced_by_the_pool_after_a_real_step_of_the_decoder(loaded: LoadedModel) -> None:
    gpu = FakeGpu(1 << 22)
    measurement = PoolMeasurement(gpu)
    capacity = capacity_of(SETTINGS, loaded)
    assert capacity.device_blocks == 2, "enough for the comparison of decoders"

    def measure(backend: TorchBackend, decoder: object) -> int:
        runner = ModelRunner(loaded, backend, 16, decoder=decoder)

        def run(plan: StepPlan) -> None:
            assert all(0 <= one.token_id < 384 and one.fault is None for one in runner.launch(plan).result())
            gpu.used += 1 << 20

        return measurement.blocks(run, SETTINGS, loaded, capacity)

    choice = choose_backend(BackendOptions("torch", loaded, capacity, None, 5, 16), measure)
    block_bytes = loaded.geometry.block_bytes(16, torch.bfloat16)
    room = int(0.9 * (1 << 22)) - (1 << 20) + cache_bytes(2, block_bytes)
    assert choice.backend.cache.nbytes == room // block_bytes * block_bytes


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory"),
            "^gpu_memory_utilization is 0.9.* does not fit beside the weights",
        ),
        (RuntimeError("no kernel image"), "^no kernel image$"),
    ],
)
def test_a_start_fails_if_the_measured_step_cannot_be_sampled(
    loaded: LoadedModel, fault: Exception, raised: str
) -> None:
    class FailingSampler(TorchSampler):
        def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
            raise fault

    capacity = capacity_of(SETTINGS, loaded)
    backend = TorchBackend(loaded.geometry, 16, capacity.device_blocks, torch.bfloat16)
    trial = ModelRunner(loaded, backend, 16, sampler=FailingSampler())
    with pytest.raises((InvalidSetting, RuntimeError), match=raised):
        PoolMeasurement(FakeGpu(GIB)).blocks(partial(run_sampled, trial), SETTINGS, loaded, capacity)


def test_the_largest_step_has_the_budget_all_sequences_and_every_filter() -> None:
    capacity = Capacity(context_tokens=30, vocabulary_size=384, block_size=16, device_blocks=2)
    work = largest_step(capacity, SETTINGS.limits()).work
    assert [len(one.token_ids) for one in work] == [1, 1, 8, 30, 30], "decoding sequences first"
    assert [one.block_table for one in work] == [(1,), (1,), (1,), (1, 1), (1, 1)]
    assert len({one.sequence for one in work if one.sequence < 0}) == 5, "no request has these ids"
    for one in work:
        assert one.samples
        assert one.rules
        assert one.rules.rules.penalizes
        assert one.sampling.top_k
        assert one.sampling.top_p < 1
        assert one.sampling.min_p


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_too_small_for_a_block_is_refused_naming_the_settings(loaded: LoadedModel, fails: bool) -> None:
    gpu = FakeGpu(GIB)
    measurement = PoolMeasurement(gpu)

    def run(_plan: StepPlan) -> None:
        gpu.used = GIB - 1000
        if fails:
            raise torch.OutOfMemoryError("CUDA out of memory")

    reason = "a step does not fit beside the weights" if fails else "0.90 GiB of it can be used, but a pool of one"
    sentence = f"^gpu_memory_utilization is 0.9, and the GPU is too small: {reason}.* 70 and max_sequences 5$"
    with pytest.raises(InvalidSetting, match=sentence):
        measurement.blocks(run, SETTINGS, loaded, capacity_of(SETTINGS, loaded))
