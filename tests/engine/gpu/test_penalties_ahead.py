"""Where the device counts tokens, penalized requests run ahead, and their tokens stay the same."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from engine.run import runner
from engine.run.samplers import Sampler, TorchSampler
from engine.run.sampling import Draw
from engine.schedule.request import BeamSearch, LogitRules, Sampling
from tests.engine.triton_case import DEVICE
from tests.engine_in_process import ModelEngine, loaded_model

pytest.importorskip("triton")
from engine.run.device_sampler import DeviceSampler

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the engine of these tests computes on a CPU")

CPU = torch.device("cpu")
PENALTIES = LogitRules(repetition_penalty=1.4, frequency_penalty=0.3)
WAYS: list[dict[str, object]] = [
    {"logit_rules": PENALTIES},
    {"logit_rules": LogitRules(presence_penalty=0.9), "sampling": Sampling(1.1, seed=4)},
    {"logit_rules": PENALTIES, "sampling": Sampling(0.9, seed=5), "samples": 2},
    {"sampling": Sampling(1.3, seed=6)},
    {"logit_rules": PENALTIES, "logprobs": 1},
]
SEQUENCES = 6

Tiny = Callable[[str], Path]


class RecordingSampler:
    """The sampler of a GPU, which notes for each draw whether its rules have tokens."""

    counts_tokens = True

    def __init__(self, vocabulary: int) -> None:
        self._sampler = DeviceSampler(SEQUENCES, vocabulary, CPU)
        self.with_tokens: list[bool] = []

    def sample(self, logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
        penalized = [one.rules for one in draws if one.rules and one.rules.rules.penalizes]
        self.with_tokens += [bool(rules.prompt) for rules in penalized]
        return self._sampler.sample(logits, draws)


def engine_of(folder: Path, sampler: Sampler, *, ahead: bool, blocks: int = 200) -> ModelEngine:
    sizes = {"block_size": 4, "device_blocks": blocks, "max_sequences": SEQUENCES, "token_budget": 24}
    return ModelEngine(folder, **sizes, ahead=ahead, sampler=sampler)  # type: ignore[arg-type]


def answers(engine: ModelEngine, *, cancels: bool = False) -> dict[str, list[list[int]]]:
    """Return the tokens of requests of all ways; with `cancels` one of them is cancelled after some tokens."""
    names = [
        engine.submit(range(3 + number, 12 + 2 * number), 8 + number, **way)  # type: ignore[arg-type]
        for number, way in enumerate(WAYS)
    ]
    if cancels:
        engine.turn_until(lambda: len(engine.tokens[names[0]]) >= 3)
        engine.scheduler.requests.cancel(names[0])
    engine.run()
    return {name: engine.samples[name] for name in names[cancels:]}


@pytest.mark.parametrize("event", ["none", "preemption", "cancellation"])
def test_penalized_requests_get_the_same_tokens_a_step_ahead(tiny_model: Tiny, event: str) -> None:
    folder = tiny_model("llama")
    expected = answers(engine_of(folder, TorchSampler(), ahead=False))
    sampler = RecordingSampler(loaded_model(folder).vocabulary_size)
    engine = engine_of(folder, sampler, ahead=True, blocks=14 if event == "preemption" else 200)
    found = answers(engine, cancels=event == "cancellation")
    assert found == {name: expected[name] for name in found}
    assert (engine.scheduler.totals.preemptions > 0) == (event == "preemption")
    assert sampler.with_tokens.count(False) > sampler.with_tokens.count(True), "most draws read the device's counts"


@pytest.mark.parametrize("counts", [False, True])
def test_penalized_requests_sit_out_only_where_the_sampler_does_not_count(tiny_model: Tiny, counts: bool) -> None:
    folder = tiny_model("llama")
    sampler = DeviceSampler(SEQUENCES, loaded_model(folder).vocabulary_size, CPU) if counts else TorchSampler()
    engine = engine_of(folder, sampler, ahead=True)
    for number in range(3):
        engine.submit(range(5 + number), 12)
    engine.submit(range(4), 8, logit_rules=PENALTIES)
    engine.run()
    assert (engine.scheduler.totals.sat_out == 0) == counts


def test_beams_with_penalties_still_sit_out(tiny_model: Tiny) -> None:
    folder = tiny_model("llama")
    results = []
    for ahead in (False, True):
        engine = engine_of(folder, DeviceSampler(SEQUENCES, loaded_model(folder).vocabulary_size, CPU), ahead=ahead)
        names = [engine.submit(range(5), 9, logit_rules=PENALTIES) for _ in range(2)]
        names.append(engine.submit(range(6), 6, logit_rules=PENALTIES, beam_search=BeamSearch(2)))
        engine.run()
        results.append([engine.samples[name] for name in names])
        assert (engine.scheduler.totals.sat_out > 0) == ahead
    assert results[0] == results[1]


def test_a_failure_after_the_draws_counts_no_token_twice_and_fails_no_other_request(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, failures = tiny_model("llama"), []
    engine = engine_of(folder, DeviceSampler(2, loaded_model(folder).vocabulary_size, CPU), ahead=True)
    penalized = engine.submit(range(4), 6, logit_rules=PENALTIES)
    scored = engine.submit(range(5), 6, logprobs=1)
    engine.turn_until(lambda: len(engine.tokens[penalized]) >= 2)

    def fail(*_: object) -> None:
        monkeypatch.undo()
        failures.append(len(engine.tokens[penalized]))
        raise RuntimeError("made to fail")

    monkeypatch.setattr(runner, "_scores_of", fail)
    engine.run()
    assert failures
    reference = engine_of(folder, TorchSampler(), ahead=False)
    assert engine.tokens[penalized] == reference.generate([range(4)], 6, logit_rules=PENALTIES)[0]
    assert engine.finished[scored].failure is None
