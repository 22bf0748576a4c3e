"""Methods that are not served are refused by name, with bits or type, and with what helps."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.methods import scheme_of

HELP = (
    "which is not served: use a GGUF file, such as Q4_K_M, or a checkpoint in bfloat16, on CPUs with --weights int8 or "
    "int4"
)
# What transformers 5.23 writes, unless another source is given.
REFUSED: dict[str, dict[str, Any]] = {
    "hqq, 4 bits": {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
    "hqq, 3 bits": {"quant_method": "hqq", "nbits": 3},
    "torchao, Int4WeightOnlyConfig": {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_version": 2, "_data": {"group_size": 128}}},
    },
    "torchao, int4_weight_only": {"quant_method": "torchao", "quant_type": "int4_weight_only"},
    "quanto, int8": {"quant_method": "quanto", "weights": "int8", "activations": None},
    "eetq, int8": {"quant_method": "eetq", "weights": "int8"},
    "aqlm": {"quant_method": "aqlm", "nbits_per_codebook": 16, "num_codebooks": 1},
    "vptq": {"quant_method": "vptq", "config_for_layers": {}, "shared_layer_config": {}},
    "spqr, 3 bits": {"quant_method": "spqr", "bits": 3, "beta1": 16},
    "higgs, 4 bits": {"quant_method": "higgs", "bits": 4, "p": 2},
    "quip, 2 bits": {"quant_method": "quip", "bits": 2},
    "bitnet": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
    "fp_quant, nvfp4": {"quant_method": "fp_quant", "forward_dtype": "nvfp4", "backward_dtype": "bf16"},
    "sinq, 4 bits": {"quant_method": "sinq", "nbits": 4, "group_size": 64},
    "quark": {"quant_method": "quark", "export": {}},
    "metal, 4 bits": {"quant_method": "metal", "bits": 4},
    "fouroversix, nvfp4": {"quant_method": "fouroversix", "dtype": "nvfp4"},
    "exl2, 4.25 bits": {"quant_method": "exl2", "bits": 4.25},  # of ExLlamaV2
    "by a method with an unknown name": {"quant_method": "x" * 5000, "bits": True, "weights": "\x1b[2J"},
}


def write(folder: Path, fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": fields}))
    return folder


@pytest.mark.parametrize("described", REFUSED)
def test_a_method_that_is_not_served_is_refused_with_what_helps(tmp_path: Path, described: str) -> None:
    with pytest.raises(ModelUnsupported) as refused:
        scheme_of(write(tmp_path, REFUSED[described]))
    assert str(refused.value) == f"its weights are quantized ({described}), {HELP}"


def test_objects_within_objects_are_searched_a_few_levels_deep(tmp_path: Path) -> None:
    nested: dict[str, Any] = {"bits": 4}
    for _ in range(200):
        nested = {"default": nested}
    with pytest.raises(ModelUnsupported, match=r"quantized \(hqq\), which"):
        scheme_of(write(tmp_path, {"quant_method": "hqq"} | nested))


@pytest.mark.parametrize("fields", [{"bits": 4}, ["gptq"], "gptq", {"quant_method": 4}], ids=str)
def test_a_declaration_without_a_method_is_refused(tmp_path: Path, fields: object) -> None:
    with pytest.raises(ModelUnsupported, match=r"quantized by a method that config\.json does not name: use a GGUF"):
        scheme_of(write(tmp_path, fields))
