"""The setting `weights`: what engines keep of a model's files, and where a format is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.loading import load_model
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from services.models.model_store import resolve
from services.runtime.settings import InvalidSetting
from tests.dense_model import dense_folder
from tests.engine.decoding import logits, prompt
from tests.engine.image_text import write_image_text
from tests.engine.native_kernels import FOLDER, kernels
from tests.gguf_models import MIXED, write_llama

FORMATS = {"auto": "Q6_K", "bf16": "bfloat16", "int8": "int8", "int4": "int4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a GGUF file with several formats."""
    place = tmp_path_factory.mktemp("gguf")
    return resolve(str(write_llama(place / "tiny.gguf", MIXED)), place / "cache", lambda *_: None)


def start(model: Path, kernels_folder: Path = FOLDER, **settings: Any) -> EngineParts:
    return assemble(EngineSettings(model=str(model), device_blocks=8, kernels_folder=str(kernels_folder), **settings))


def compile_in(folder: Path) -> None:
    """Give a folder without verified models the kernels; skip the test if this CPU cannot run them."""
    compiled = FOLDER / f"{kernels().name}.so"
    (folder / compiled.name).symlink_to(compiled)


def logits_of(parts: EngineParts) -> torch.Tensor:
    return logits(parts.runner._runner, (prompt(20, 1), 0, (1, 2)))  # type: ignore[attr-defined]


def test_the_log_of_a_start_has_the_file_and_the_formats_of_weights_and_cache(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kernels()
    with caplog.at_level(logging.INFO, "quire.engine"):
        start(folder, dtype="bfloat16", kv_dtype="int8", model_name="mine")
    assert f"loading mine from {folder.parents[1] / 'tiny.gguf'}" in caplog.messages
    assert "mine runs in bfloat16 with weights in Q6_K and a KV cache in int8" in caplog.messages


def test_the_text_part_of_an_image_text_model_runs_on_the_cpus_kernels(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    compile_in(tmp_path)
    model = tmp_path / "model"
    write_image_text("qwen2_5_vl", model)
    with caplog.at_level(logging.INFO, "quire.engine"):
        first, second = (start(model, tmp_path, dtype="bfloat16", model_name="mine") for _ in range(2))
    assert (first.loaded.model is None, second.loaded.model is None) == (False, True)
    assert torch.equal(logits_of(first), logits_of(second))
    said = (
        "mine is an image-text model (qwen2_5_vl): only its text part is served, and requests with images are refused"
    )
    assert caplog.messages.count(said) == 2


@pytest.mark.parametrize("weights", FORMATS)
def test_the_second_start_keeps_the_format_and_computes_the_same(folder: Path, tmp_path: Path, weights: str) -> None:
    compile_in(tmp_path)
    first, second = (start(folder, tmp_path, dtype="bfloat16", weights=weights) for _ in range(2))
    assert (first.loaded.model is None, second.loaded.model is None) == (False, True)
    assert first.loaded.weight_format == second.loaded.weight_format == FORMATS[weights]
    assert first.loaded.fingerprint == second.loaded.fingerprint
    assert torch.equal(logits_of(first), logits_of(second))


def test_each_format_has_its_fingerprint_and_its_own_verification(folder: Path, tmp_path: Path) -> None:
    compile_in(tmp_path)
    started = [start(folder, tmp_path, dtype="bfloat16", weights=weights) for weights in FORMATS]
    started.append(start(folder, dtype="float32"))
    assert len({one.loaded.fingerprint for one in started}) == len(FORMATS) + 1
    assert all(one.loaded.model is not None for one in started)


def test_packed_weights_compute_nearly_what_their_values_do(folder: Path) -> None:
    kernels()
    expected = logits_of(start(folder, dtype="float32"))
    for weights, bound in (("auto", 0.05), ("bf16", 0.05), ("int8", 0.06)):
        found = logits_of(start(folder, dtype="bfloat16", weights=weights))
        assert ((found - expected).square().mean().sqrt() / expected.std()) < bound, weights


def test_float32_has_the_values_of_the_file_and_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        parts = start(folder, dtype="float32")
    assert parts.loaded.weight_format == "float32"
    assert "the weights in Q6_K are dequantized to float32" in caplog.text
    dense = load_model(dense_folder(folder), torch.float32, torch.device("cpu")).model
    for name, value in dense.state_dict().items():
        assert torch.equal(parts.loaded.model.state_dict()[name], value), name


def test_a_model_that_the_kernels_do_not_run_is_dequantized_or_refused(
    folder: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels()
    with pytest.raises(InvalidSetting, match=r"^weights is 'int8', but the CPU's kernels do not run this model as a"):
        start(tiny_model("gpt2"), dtype="bfloat16", weights="int8")
    monkeypatch.setattr("services.engine.startup.native_kernels.matches", lambda *_: False)
    monkeypatch.setattr("services.engine.startup.verified_models.VerifiedModels.find", lambda *_: None)
    with caplog.at_level(logging.INFO):
        parts = start(folder, dtype="bfloat16")
    assert "the weights in Q6_K are dequantized to bfloat16: the CPU's kernels do not run" in caplog.text
    assert parts.loaded.weight_format == "bfloat16"
    assert parts.loaded.fingerprint == start(folder, dtype="bfloat16", weights="bf16").loaded.fingerprint


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"weights": "int8", "dtype": "float32"}, "dtype must be auto or bfloat16 with weights int8, not float32"),
        ({"weights": "bf16", "dtype": "float16"}, "dtype must be auto or bfloat16 with weights bf16, not float16"),
        (
            {"weights": "int4", "device": "cuda"},
            "device must be auto or cpu with weights int4, not cuda: only the CPU's kernels",
        ),
        (
            {"weights": "int4", "attention_backend": "torch"},
            "attention_backend must be auto or cpu with weights int4, not torch",
        ),
        ({"weights": "int8", "tensor_parallel": 2}, "tensor_parallel must be at most 1 with weights int8, not 2"),
        ({"weights": "int3"}, "weights must be one of auto, bf16, int8, int4"),
    ],
)
def test_formats_that_other_settings_exclude_are_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidSetting, match=reason):
        EngineSettings(**settings)


def test_without_kernels_a_format_is_refused_and_auto_is_dequantized(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("services.engine.startup.assembly.kernels_for", lambda *_: None)
    with pytest.raises(InvalidSetting, match="weights is 'int8', which only the CPU's kernels run, but they are not"):
        start(folder, weights="int8")
    with pytest.raises(InvalidSetting, match="weights is 'bf16', but the model runs in float32"):
        start(folder, weights="bf16")
    with caplog.at_level(logging.INFO):
        assert start(folder).loaded.weight_format == "float32"
    assert "the weights in Q6_K are dequantized to float32" in caplog.text
