"""The sweep's judgement: what it calls equal, wrong, refused and not buildable."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from engine.attention import TorchBackend
from tests.engine_in_process import ModelEngine
from tests.model_types import judgement
from tests.model_types.cases import TABLE, Case, case_named, cases, causal_types, configuration
from tests.model_types.checkpoints import write_checkpoint
from tests.model_types.judgement import judge
from tests.model_types.sizes import WINDOW

MISTRAL = case_named("mistral")


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def ignored_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = TorchBackend.attend
    monkeypatch.setattr(
        TorchBackend,
        "attend",
        lambda self, layer, query, batch, scoring: attend(self, layer, query, batch, scoring._replace(window=None)),
    )


def test_a_served_model_is_equal_and_was_tried_in_all_ways(tmp_path: Path) -> None:
    found = judge(MISTRAL, tmp_path / "model")
    assert (found.outcome, found.reason, found.plan, found.unwritten) == ("equal", "", "", ())
    assert found.tokens > 10
    assert found.hits > 100
    assert found.preemptions > 0


@pytest.mark.usefixtures("ignored_windows")
def test_a_backend_that_ignores_windows_is_wrong(tmp_path: Path) -> None:
    found = judge(MISTRAL, tmp_path / "model")
    assert found.outcome == "wrong"
    assert found.reason.startswith("alone: token ")
    assert f"after {judgement.LENGTHS[0]} tokens" in found.reason, "the text outgrows the window"
    assert judgement.LENGTHS[0] < WINDOW < judgement.LENGTHS[1]


def test_an_answer_that_is_wrong_with_others_only_names_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = ModelEngine.generate

    def faulty(self: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        answers = generate(self, prompts, max_tokens)
        if len(prompts) > 1:
            answers[1][3] = (answers[1][3] + 1) % 300
        return answers

    monkeypatch.setattr(ModelEngine, "generate", faulty)
    found = judge(MISTRAL, tmp_path / "model")
    assert found.outcome == "wrong"
    assert found.reason.startswith(f"together: token 3 after {judgement.LENGTHS[1]} tokens is ")


def test_a_refused_model_has_the_reason_of_the_engine(tmp_path: Path) -> None:
    found = judge(case_named("falcon_mamba"), tmp_path / "model")
    assert found.outcome == "refused"
    assert found.reason.startswith("its layer 0 is of type linear_attention, which keeps a state")


def test_a_configuration_that_transformers_refuses_is_not_buildable(tmp_path: Path) -> None:
    found = judge(Case("mamba2", "", {"num_heads": 3}), tmp_path / "model")
    assert found.outcome == "not buildable"
    assert "hidden_size * expand" in found.reason


def test_a_model_that_transformers_cannot_run_is_not_buildable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise IndexError("no such row")

    monkeypatch.setattr(LlamaForCausalLM, "forward", broken)
    assert judge(case_named("llama"), tmp_path / "model")[:2] == ("not buildable", "IndexError: no such row")


def test_a_plan_of_another_geometry_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judgement, "read_shape", lambda *_: SimpleNamespace(geometry="another"))
    found = judge(MISTRAL, tmp_path / "model")
    assert found.outcome == "equal"
    assert found.plan.startswith("planned another, loaded CacheGeometry(")


def test_each_type_has_a_case_as_published() -> None:
    assert {case.model_type for case in cases() if not case.variant} == set(causal_types())
    assert sum(bool(case.variant) for case in cases()) >= 60
    assert set(causal_types()) >= TABLE.keys()


def test_a_type_that_the_table_lacks_gets_plain_sizes() -> None:
    config = configuration(Case("llama", "", {}))
    assert (config.hidden_size, config.num_key_value_heads, config.vocab_size) == (64, 2, 300)
    assert getattr(config, "sliding_window", None) is None


def test_every_parameter_is_random(tmp_path: Path) -> None:
    assert write_checkpoint(case_named("gpt_oss"), tmp_path) == []
    stored = load_file(tmp_path / "model.safetensors")
    assert all((tensor != tensor.flatten()[0]).any() for tensor in stored.values() if tensor.numel() > 1)
