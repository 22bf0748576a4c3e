"""Models whose decoder was verified at an earlier start are loaded from their files, without transformers."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.loading import load_model
from services.engine.settings import EngineSettings
from services.engine.startup import native_kernels
from services.engine.startup.assembly import EngineParts, assemble
from services.engine.startup.verified_models import VerifiedModel, VerifiedModels
from services.models.model_store import default_cache
from tests.engine.decoding import logits, prompt
from tests.engine.native_kernels import kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with compiled kernels and no verified model."""
    made = tmp_path_factory.mktemp("kernels")
    name = kernels().name
    shutil.copy(default_cache().parent / "kernels" / f"{name}.so", made)
    return made


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def start(model: Path, folder: Path, kv_dtype: str = "auto") -> EngineParts:
    settings = EngineSettings(
        model=str(model), dtype="bfloat16", device_blocks=8, kernels_folder=str(folder), kv_dtype=kv_dtype
    )
    return assemble(settings)


def logits_of(parts: EngineParts) -> torch.Tensor:
    return logits(parts.runner._runner, (prompt(20, 1), 0, (1, 2)))


def test_the_second_start_uses_the_files_alone_and_computes_the_same(model: Path, folder: Path) -> None:
    first, second = start(model, folder), start(model, folder)
    assert first.loaded.model is not None
    assert second.loaded.model is None
    assert torch.equal(logits_of(first), logits_of(second))
    for name in ("geometry", "context_tokens", "vocabulary_size", "eos_token_ids", "fingerprint", "dtype"):
        assert getattr(first.loaded, name) == getattr(second.loaded, name)


def test_a_decoder_is_verified_with_each_type_of_kv_cache(model: Path, folder: Path) -> None:
    plain, first, second = start(model, folder), start(model, folder, "int8"), start(model, folder, "int8")
    assert [first.loaded.model is None, second.loaded.model is None] == [False, True]
    assert first.loaded.fingerprint == second.loaded.fingerprint == f"{plain.loaded.fingerprint}-kv-int8"
    assert torch.equal(logits_of(first), logits_of(second))


def test_a_start_from_files_does_not_import_transformers(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(model, folder)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "engine.model.loading", None)
    assert start(model, folder).loaded.model is None


def test_without_a_folder_nothing_is_written(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_kernels, "load_kernels", lambda _: kernels())  # otherwise they would be compiled
    (working := tmp_path / "working").mkdir()
    monkeypatch.chdir(working)
    assemble(EngineSettings(model=str(model), dtype="bfloat16", device_blocks=8))
    assert list(working.iterdir()) == []


@pytest.mark.parametrize("changed", ["config.json", "generation_config.json", "model.safetensors"])
def test_a_model_with_a_changed_file_is_verified_again(model: Path, folder: Path, changed: str) -> None:
    start(model, folder)
    if changed.endswith(".json"):
        (model / changed).write_text((model / changed).read_text() + "\n")
    else:
        tensors = load_file(model / changed)
        save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, model / changed, {"format": "pt"})
    assert start(model, folder).loaded.model is not None
    assert start(model, folder).loaded.model is None


def test_a_damaged_description_is_logged_and_replaced(
    model: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (model / "config.json").write_text((model / "config.json").read_text() + "  ")
    start(model, folder)
    for description in folder.glob("verified-*.json"):
        description.write_text(description.read_text().replace('"hidden": ', '"hidden": 1'))
    assert start(model, folder).loaded.model is not None
    assert "cannot be read, so the model is loaded with transformers" in caplog.text
    assert start(model, folder).loaded.model is None


def test_a_description_that_cannot_be_written_is_logged(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    verified = VerifiedModel.of(load_model(model, torch.bfloat16, torch.device("cpu")))
    VerifiedModels(tmp_path / "file").add(model, kernels(), verified)
    assert "cannot be written, so later starts take longer" in caplog.text
