"""Which engines take the memory of an earlier one, and which refuse it by name."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.errors import ModelUnsupported
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from services.runtime.settings import InvalidSetting
from tests.services.engine.kept.test_memory_file import folder, path

__all__ = ["folder", "path"]


@pytest.fixture
def model(tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of the tiny model, whose files may be changed."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "model"))


def refused(model: Path, path: Path, **settings: Any) -> str:
    """Assemble an engine, end it without erasing, and return why it refused what it found."""
    given: dict[str, Any] = {"device_blocks": 32, "dtype": "float32", "attention_backend": "torch", **settings}
    kept = assemble(EngineSettings(model=str(model), keep_blocks=str(path), **given)).kept
    assert kept is not None
    kept.end(keep=True)
    return kept.refused


@pytest.mark.parametrize(
    ("settings", "difference"),
    [
        ({}, ""),
        ({"device_blocks": 33}, "device_blocks"),
        ({"host_blocks": 4}, "host_blocks"),
        ({"block_size": 8}, "block_size"),
        ({"kv_dtype": "int8"}, "dtype"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"threads": 1}, "backend"),
    ],
)
def test_a_memory_of_another_engine_is_refused_by_name(
    model: Path, path: Path, settings: dict[str, Any], difference: str
) -> None:
    if settings.get("threads"):
        refused(model, path, threads=2)
    else:
        refused(model, path)
    assert refused(model, path, **settings) == difference
    assert refused(model, path, **settings) == ""  # it is used anew


def test_a_changed_weight_changes_the_fingerprint(model: Path, path: Path) -> None:
    refused(model, path)
    weights = load_file(model / "model.safetensors")
    middle = next(name for name in sorted(weights) if "layers.1" in name)
    weights[middle].flatten()[7] += 1  # neither end of the file
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert refused(model, path) == "fingerprint"


def test_a_folder_has_a_file_for_each_engine(model: Path, folder: Path) -> None:
    for name in ("a/0", "b"):
        refused(model, folder, engine_id=name)
    assert sorted(one.name for one in folder.iterdir()) == ["a%2F0.blocks", "b.blocks"]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"keep_blocks": "memory"}, "keep_blocks is 'memory', which only quire serve has"),
        ({"keep_blocks": "/nowhere/kept"}, "keep_blocks is '/nowhere/kept', which cannot be opened: No such file"),
        ({"keep_blocks": "x", "tensor_parallel": 2}, "ranks keep no blocks"),
        ({"keep_blocks": "x", "device": "cuda"}, "the memory of a GPU ends with its process"),
        ({"keep_blocks": "off", "keep_at_stop": True}, "nothing is kept"),
    ],
)
def test_what_cannot_keep_blocks_is_refused(model: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises((InvalidSetting, ModelUnsupported), match=reason):
        assemble(EngineSettings(model=str(model), device_blocks=32, attention_backend="torch", **settings))
