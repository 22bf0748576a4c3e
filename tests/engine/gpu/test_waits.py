"""Launching a step never waits for the device: on a GPU by torch's own check, else on a device that cannot be read."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.run.runner import ModelRunner
from engine.schedule.request import LogitRules, Sampling
from engine.schedule.step_plan import PENDING, PromptPart, RowRules, StepPlan, Work
from tests.engine.families import FAMILIES, Checkpoint
from tests.engine.unread_device import UNREAD, WaitsForDevice, never_waiting
from tests.engine_in_process import GREEDY

pytest.importorskip("triton")

from engine.gpu.graphs import RecordedDecoder, Result, Run
from engine.gpu.llama import LlamaDecoder
from engine.gpu.piecewise import PiecewiseDecoder
from engine.gpu.triton_backend import TritonBackend

GPU = pytest.param(
    torch.device("cuda"), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"), id="gpu"
)
DEVICES = [pytest.param(UNREAD, id="unread"), GPU]
RANDOM = Sampling(0.7, seed=3, top_k=5, top_p=0.9, min_p=0.01)
PROMPTS = (Work(1, (5, 6, 7), 0, (1,), True, GREEDY), Work(2, (8,), 0, (2,), True, RANDOM))
# Launched ahead: the tokens of the step before are still on the device.
AHEAD = (Work(1, (PENDING,), 3, (1,), True, GREEDY), Work(2, (PENDING,), 1, (2,), True, RANDOM))


class Place:
    """A model on a device."""

    def __init__(self, checkpoint: Checkpoint, family: str, device: torch.device) -> None:
        loaded = load_model(checkpoint(FAMILIES[family]), torch.bfloat16, torch.device("cpu"))
        self.loaded: LoadedModel = replace(loaded, model=loaded.model.to(device), device=device)
        self.device = device
        self.backend = TritonBackend(loaded.geometry, 16, 12, torch.bfloat16, device)
        self.modules = ModulesDecoder(self.loaded, self.backend)

    def check(self, decoder: Decoder, *steps: tuple[Work, ...]) -> None:
        runner = ModelRunner(self.loaded, self.backend, 16, decoder=decoder)
        if self.device.type == "cuda":  # compile and record first
            self._launch(runner, steps)
        with never_waiting(self.device):
            self._launch(runner, steps)

    def _launch(self, runner: ModelRunner, steps: tuple[tuple[Work, ...], ...]) -> None:
        for number, work in enumerate(steps):
            runner.launch(StepPlan(number, (), work))


def _record(run: Run[Result]) -> tuple[Callable[[], None], Result]:
    return lambda: None, run()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "family",
    ["llama", "mixtral", "gemma2", "gpt2", "gpt_neox", "opt", "phi3 with long rotations", "qwen3 with windows"],
)
def test_steps_of_the_modules_do_not_wait(checkpoint: Checkpoint, family: str, device: torch.device) -> None:
    place = Place(checkpoint, family, device)
    place.check(place.modules, PROMPTS, AHEAD)


@pytest.mark.parametrize("device", DEVICES)
def test_steps_of_the_decoder_with_few_launches_do_not_wait_recorded_or_not(
    checkpoint: Checkpoint, device: torch.device
) -> None:
    place = Place(checkpoint, "qwen3", device)
    decoder = LlamaDecoder.of_model(place.loaded.model, place.backend, place.loaded.context_tokens)
    place.check(decoder, PROMPTS, AHEAD)
    recorded = RecordedDecoder(decoder, _record, 16, 6, [1, 2], device)
    place.check(recorded, PROMPTS, AHEAD)
    pieces = PiecewiseDecoder(decoder, recorded, _record, [6])
    with nullcontext() if device.type == "cuda" else never_waiting(device):  # without kernels
        pieces.prepare(lambda done, of: None)
    place.check(pieces, PROMPTS, AHEAD)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 5},
        {"to_score": PromptPart(1, (6, 7), 5)},
        {"to_score": PromptPart(1, (6, 7), 5), "samples": False},
        {"rules": RowRules(LogitRules(repetition_penalty=1.3), prompt=(5, 6, 7))},
        {"rules": RowRules(LogitRules(logit_bias=((3, 2.0),)), banned_token_ids=frozenset({4}))},
        {"rules": RowRules(mask=b"\xff" * 64)},
        {"sample_indices": (0, 1)},
    ],
    ids=lambda asked: " ".join(asked),
)
def test_steps_with_scores_and_rules_do_not_wait(
    checkpoint: Checkpoint, asked: dict[str, Any], device: torch.device
) -> None:
    place = Place(checkpoint, "llama", device)
    first, second = PROMPTS
    place.check(place.modules, (first._replace(**asked), second))


@pytest.mark.parametrize(
    "waits",
    [
        lambda numbers: numbers.sum().item(),
        lambda numbers: numbers.tolist(),
        lambda numbers: bool(numbers[0] > 0),
        lambda numbers: 3 in numbers,
        lambda numbers: numbers.cpu(),
        lambda numbers: numbers.nonzero(),
        lambda numbers: numbers[numbers > 0],
        lambda numbers: torch.tensor([1], device=numbers.device),
        lambda numbers: torch.zeros(3).to(numbers.device),
        lambda numbers: numbers.copy_(torch.zeros(3)),
    ],
)
def test_whatever_waits_fails_on_a_device_that_cannot_be_read(waits: Callable[[torch.Tensor], object]) -> None:
    numbers = torch.zeros(3, device=UNREAD)
    raised = pytest.raises((WaitsForDevice, RuntimeError, NotImplementedError))
    with raised, torch.inference_mode(), never_waiting(UNREAD):
        waits(numbers)
