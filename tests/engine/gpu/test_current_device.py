"""Kernels and events of a rank whose GPU is not the first one go to its GPU, whatever device a thread begins with."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blocks import Copy
from engine.gpu.graphs import CudaRecorder
from engine.model.loading import load_model
from engine.parallel.plan_message import PlanEncoder
from engine.parallel.worker import Worker
from engine.run.forward import ForwardPass
from engine.run.runner import ModelRunner
from engine.run.samplers import sampler_for
from engine.schedule.request import LogitRules, Sampling
from engine.schedule.step_plan import Copies, RowRules, StepPlan, Work
from services.engine.ranks.rank_slice import SliceLoader
from services.engine.startup.assembly import seconds_per_swapped_block
from tests.engine.gpu_in_host_memory import GpuInHostMemory
from tests.engine.happens_before import FakeCuda
from tests.engine_in_process import GREEDY

pytest.importorskip("triton")
from triton.runtime.interpreter import InterpretedFunction

from engine.gpu.llama import LlamaDecoder
from engine.gpu.triton_backend import TritonBackend
from engine.run.device_sampler import DeviceSampler

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs under Triton's interpreter")

SECOND = torch.device("cuda", 1)
PENALIZED = RowRules(LogitRules(frequency_penalty=0.5), prompt=(5, 6, 7))
COPIES = Copies((Copy(1, 1),), (Copy(1, 3),), (Copy(2, 4),))
WORK = (
    Work(1, (5, 6, 7), 0, (1,), True, GREEDY, rules=PENALIZED),
    Work(2, (8,), 0, (2,), True, Sampling(0.7, seed=3, top_k=5, top_p=0.9)),
)
PLAN = StepPlan(1, (COPIES,), WORK)


class Place:
    """A model for the second GPU, and the devices on which its kernels were launched."""

    def __init__(self, folder: Path, cuda: FakeCuda) -> None:
        loaded = load_model(folder, torch.float32, torch.device("cpu"))
        self.cuda = cuda
        self.devices: list[int] = []
        self.loaded = replace(loaded, device=SECOND)
        self.backend = TritonBackend(loaded.geometry, 16, 8, torch.float32, SECOND, host_blocks=2)
        self.decoder = LlamaDecoder.of_model(loaded.model, self.backend, loaded.context_tokens)
        self.devices.clear()

    def runner(self) -> ModelRunner:
        sampler = DeviceSampler(4, self.loaded.vocabulary_size, SECOND)
        return ModelRunner(self.loaded, self.backend, 16, decoder=self.decoder, sampler=sampler)

    def run_worker(self) -> None:
        broadcast = SimpleNamespace(broadcast=self.note)
        forward = ForwardPass(self.decoder, self.backend, 16, SECOND)
        Worker(broadcast, forward, SECOND).launch(PlanEncoder().encode(PLAN, shares_tokens=True))

    def measure_swaps(self) -> None:
        cache = SimpleNamespace(device=SECOND, is_cuda=True)
        backend = SimpleNamespace(cache=cache, host_cache=cache, swap=self.note)
        seconds_per_swapped_block(backend)  # type: ignore[arg-type]

    def connect(self) -> None:
        loader = SliceLoader.__new__(SliceLoader)
        loader.device = SECOND
        loader._connect = self.note  # type: ignore[assignment,method-assign]
        loader.connect(None)  # type: ignore[arg-type]

    def note(self, *given: Any) -> Any:
        self.devices.append(self.cuda.device)
        return given[0] if given else None


@pytest.fixture
def place(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    cuda.install_graphs(monkeypatch)
    plain = InterpretedFunction.run
    with GpuInHostMemory():
        place = Place(tiny_model("llama"), cuda)

        def run(*arguments: Any, **named: Any) -> Any:
            place.note()
            return plain(*arguments, **named)

        monkeypatch.setattr(InterpretedFunction, "run", run)
        yield place


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(lambda place: place.runner().launch(PLAN), id="step"),
        pytest.param(lambda place: place.runner().forward(WORK), id="forward pass"),
        pytest.param(Place.run_worker, id="step of another rank"),
        pytest.param(lambda place: CudaRecorder(SECOND)(place.note), id="capture"),
        pytest.param(lambda place: sampler_for(SECOND, 4, 50, torch.float32), id="start of the sampler"),
        pytest.param(Place.measure_swaps, id="measured swaps"),
        pytest.param(Place.connect, id="start of a rank"),
    ],
)
def test_all_kernels_are_launched_on_the_models_gpu(place: Place, launch: Callable[[Place], object]) -> None:
    launch(place)
    assert place.devices
    assert set(place.devices) == {SECOND.index}
    assert place.cuda.device == 0, "the thread has its device again"
