"""Checkpoints with quantized experts: modules that decode them where they are used, and experts that are not whole."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.torch_backend import TorchBackend
from engine.errors import ModelUnsupported
from engine.model import weights
from engine.model.decoded_weights import decode
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.run.runner import ModelRunner
from tests.engine.decoding import logits
from tests.engine.model.test_library_checkpoints import CPU, FOLDERS
from tests.engine.native.formats.quantized.twins import dequantized
from tests.model_types.judgement import random_prompts

EXPERTS = ("mxfp4", "bitsandbytes-int8-experts", "fp8-experts", "fp8-stacked-experts")
INT8 = FOLDERS / "bitsandbytes-int8-experts"


def last_logits(loaded: LoadedModel) -> torch.Tensor:
    runner = ModelRunner(loaded, TorchBackend(loaded.geometry, 16, 12, loaded.dtype), 16)
    return logits(runner, (tuple(random_prompts()[0]), 0, tuple(range(1, 9))))[0]


@pytest.mark.parametrize("name", EXPERTS)
def test_modules_decode_the_chosen_experts_where_they_are_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = last_logits(load_model(FOLDERS / name, torch.bfloat16, CPU))
    monkeypatch.setattr(weights, "LOADED_BYTES", 0)
    decoded = load_model(FOLDERS / name, torch.bfloat16, CPU, packed=True)
    experts = decoded.model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.untyped_storage().nbytes() == 2
    apart = (last_logits(decoded) - expected).square().mean().sqrt() / expected.std()
    assert apart < 0.05
    decode(decoded.model)
    assert torch.equal(last_logits(decoded), expected)


def test_a_part_of_the_experts_may_be_quantized(tmp_path: Path) -> None:
    """As files may say that some modules are not converted."""
    folder = Path(shutil.copytree(INT8, tmp_path / "model"))
    path, values = folder / "model.safetensors", dequantized(INT8)
    tensors = load_file(path)
    for name in [one for one in tensors if ".experts.1." in one or ("layers.1" in one and "experts" in one)]:
        tensors.pop(name)
        if name.endswith(".weight"):
            tensors[name] = values[name]
    save_file(tensors, path, {"format": "pt"})
    found, expected = (load_model(one, torch.float32, CPU) for one in (folder, INT8))
    assert torch.equal(last_logits(found), last_logits(expected))


def test_experts_are_quantized_again_at_load_in_their_places() -> None:
    """int8 of MXFP4: each matrix stays in its place of the tensors of all experts."""
    folder = FOLDERS / "mxfp4"
    found, expected = (load_model(folder, torch.float32, CPU, kind).model for kind in ("int8", "auto"))
    for name, one in expected.named_parameters():
        assert (dict(found.named_parameters())[name] - one).abs().max() <= one.abs().max() / 100


def test_an_expert_without_a_matrix_is_refused_by_its_name(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(INT8, tmp_path / "model"))
    path, missing = folder / "model.safetensors", "model.layers.1.mlp.experts.2.up_proj"
    tensors = load_file(path)
    save_file({name: one for name, one in tensors.items() if missing not in name}, path, {"format": "pt"})
    with pytest.raises(ModelUnsupported, match=rf"its files lack tensor {missing}\.weight, although they have "):
        load_model(folder, torch.float32, CPU)
