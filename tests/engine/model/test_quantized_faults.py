"""Quantized folders that are read as other models than they are, or that take long, are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from engine.errors import ModelUnsupported
from engine.model.loading import load_model
from engine.model.packed_size import _beside
from engine.native.formats.quantized.compressed_tensors import compressed_tensors
from engine.native.formats.quantized.fields import _compiled, matches, seconds_of_each
from engine.native.formats.stored import stored_format
from engine.parallel.loading import ModelFolder
from engine.parallel.ranks import OneRank
from services.models.files.bounded_json import InvalidModelFile
from services.models.files.folder_check import check_configuration
from tests.engine.native.formats.quantized.writers import write_gptq

CPU = torch.device("cpu")
CHECKPOINTS = Path(__file__).parents[2] / "data" / "quantized"


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CHECKPOINTS / "gptq-v1-sym-g32", tmp_path / "gptq"))


def change_tensors(folder: Path, **changed: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: one for name, one in changed.items() if one is not None}
    kept = {name: one for name, one in tensors.items() if changed.get(name, one) is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def test_a_quantized_matrix_of_a_conv1d_is_refused_by_its_name(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    square = tensors.pop("transformer.h.0.attn.c_proj.weight")
    parts = write_gptq(square.float().numpy(), 4, 32).parts
    tensors |= {f"transformer.h.0.attn.c_proj.{suffix}": part for suffix, part in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    declared = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": declared}))
    with pytest.raises(ModelUnsupported, match=r"c_proj\.weight is quantized, which is not served in modules of type"):
        load_model(tmp_path, torch.float32, CPU)


def test_ranks_refuse_quantized_tensors_that_their_model_lacks(gptq: Path) -> None:
    change_tensors(gptq, **{"model.layers.0.mlp.up_proj.bias": torch.ones(128)})
    with pytest.raises(ModelUnsupported, match=r"unknown tensor model\.layers\.0\.mlp\.up_proj\.bias"):
        ModelFolder(gptq, 1).load(OneRank(), torch.float32, CPU)


def test_a_declaration_without_quantized_tensors_names_no_format(tmp_path: Path, gptq: Path) -> None:
    assert stored_format(gptq) == "gptq int4 g32"
    for path in gptq.glob("*.safetensors"):
        save_file({"model.norm.weight": torch.ones(64)}, path)
    assert stored_format(gptq) == ""


def test_codes_that_no_file_declares_are_refused_before_they_are_loaded(gptq: Path) -> None:
    (gptq / "quantize_config.json").unlink()
    with pytest.raises(
        ModelUnsupported, match=r"looks like a part of weights quantized by GPTQ, but config\.json has no"
    ):
        stored_format(gptq)
    for path in gptq.glob("*.safetensors"):
        path.unlink()
    assert stored_format(gptq) == ""  # a configuration alone


def test_more_experts_than_the_configuration_says_have_no_negative_size() -> None:
    with pytest.raises(ModelUnsupported, match="its files have more weights than its configuration says"):
        _beside(100, 201, 200, "mxfp4")


@pytest.mark.parametrize("number", ["01", "\u0661"])
def test_a_number_in_another_spelling_is_refused(gptq: Path, number: str) -> None:
    name = f"model.layers.{number}.mlp.up_proj.weight"
    change_tensors(gptq, **{name: torch.zeros(2, 2)})
    with pytest.raises(
        ModelUnsupported, match=f"its tensor {name} has the number {number}, which has another spelling"
    ):
        load_model(gptq, torch.float32, CPU)


def test_texts_of_files_are_printable_and_short_in_messages() -> None:
    message = str(ModelUnsupported("its name is \x1b[31mred\n" + "x" * 100_000 + "\udc80"))
    assert message.isprintable()
    assert len(message) < 3000
    assert message.startswith("its name is \\x1b[31mred x")


def test_a_label_names_four_kinds_of_weights_at_most() -> None:
    groups = {
        str(size): {"targets": [str(size)], "weights": {"num_bits": 4, "group_size": size}, "format": "pack-quantized"}
        for size in range(32, 352, 32)
    }
    found = compressed_tensors({"config_groups": groups}).label
    assert found == "compressed-tensors w4a16 g32 + w4a16 g64 + w4a16 g96 + w4a16 g128 + 6 more"


def test_a_fault_of_a_declaration_names_the_file_that_has_it(gptq: Path) -> None:
    declared = json.loads((gptq / "quantize_config.json").read_text())
    (gptq / "quantize_config.json").write_text(json.dumps(declared | {"bits": 5}))
    with pytest.raises(InvalidModelFile, match=r"^quantize_config\.json: its quantization has bits 5"):
        check_configuration(gptq)


def test_a_pattern_is_compiled_once_for_all_modules() -> None:
    patterns = [f"(.*)*x{number}$" for number in range(1000)]  # more than the library keeps
    compiled = []
    for module in ("model.layers.0", "model.layers.1"):
        assert not any(matches(pattern, module) for pattern in patterns)
        compiled.append(_compiled.cache_info().misses)
    assert compiled[0] == compiled[1]


@pytest.mark.parametrize("comparisons", [1, 1400, 400_000, 1_000_000])
def test_all_comparisons_with_patterns_end_within_two_minutes(comparisons: int) -> None:
    assert comparisons * seconds_of_each(comparisons) <= 100
    assert seconds_of_each(comparisons) >= 1e-4
