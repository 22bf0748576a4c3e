"""`make gpu-check` measures and checks the sampler that the engine has on a GPU, in the way that it decodes."""

import io
import time
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.given_logits import WAYS, GivenLogits, known_tokens, logits_of
from bench.gpu_check.llama_engine import TINY, decoders, device_sampler, random_model, runner_of
from bench.gpu_check.notes import Notes
from bench.gpu_check.parts import sampler as part
from engine.run.samplers import TorchSampler
from engine.schedule.request import Sampling
from engine.schedule.step_plan import StepPlan, Work
from engine.triton_kernels.sampling.launch import Batch, choose_tokens
from tests.engine.triton_case import DEVICE

CPU = torch.device("cpu")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each launch of the GPU's sampler."""
    found: list[int] = []

    def noted(batch: Batch) -> torch.Tensor:
        found.append(len(batch.logits))
        return choose_tokens(batch)

    monkeypatch.setattr("engine.run.device_sampler.choose_tokens", noted)
    return found


def test_the_sampler_part_measures_the_gpus_kernels(launches: list[int]) -> None:
    written = io.StringIO()
    with torch.inference_mode():
        part.measure(part.SMALL, DEVICE, Notes(written), Deadline(time.monotonic() + 3600))
    assert "failure" not in written.getvalue()
    steps = 1 + 2 * part.SMALL.repetitions
    assert launches.count(part.SMALL.rows) == steps * (len(WAYS) + 1)


def test_a_model_is_sampled_by_the_gpus_kernels(launches: list[int]) -> None:
    loaded = random_model(TINY, DEVICE)
    with torch.inference_mode():
        runner = runner_of(loaded, decoders(loaded, 4, (1,), DEVICE), 1)
        launches.clear()
        work = Work(0, (7,), 0, (1,), True, Sampling(temperature=0.0))
        (one,) = runner.launch(StepPlan(1, (), (work,))).result()
    assert 0 <= one.token_id < loaded.vocabulary_size
    assert launches == [1]


@pytest.mark.parametrize("name", WAYS)
def test_the_first_step_of_a_way_chooses_the_tokens_of_torch(name: str) -> None:
    logits, known = logits_of(3, 300, CPU), known_tokens(3, 8, 300)
    ours = GivenLogits(logits.to(DEVICE), device_sampler(3, 300, logits.dtype, DEVICE))
    assert ours.sample(WAYS[name], known) == GivenLogits(logits, TorchSampler()).sample(WAYS[name], known)


def test_penalized_steps_read_the_tokens_of_a_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = device_sampler(2, 300, torch.bfloat16, DEVICE)
    added: list[int] = []
    add = sampler._counts.add

    def noted(sequence: int, *given: Any) -> None:
        added.append(sequence)
        add(sequence, *given)

    monkeypatch.setattr(sampler._counts, "add", noted)
    runner, known = GivenLogits(logits_of(2, 300, DEVICE), sampler), known_tokens(2, 8, 300)
    for _ in range(3):
        runner.sample(WAYS["penalties"], known)
    assert added == [0, 1]
