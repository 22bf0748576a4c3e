"""Which weights a compressed-tensors declaration has for a module."""

from typing import Any

import pytest

from engine.native.formats.quantized.compressed.groups import Targets, weights_by_target
from engine.native.formats.quantized.methods import METHODS

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


def declared(*targets: list[str], **others: Any) -> dict[str, Any]:
    """Return a declaration whose groups have 2, 3, ... bits, to be told apart."""
    groups = {
        f"group_{place}": {"targets": names, "weights": {"num_bits": place + 2, "type": "int", "strategy": "channel"}}
        for place, names in enumerate(targets)
    }
    return {"config_groups": groups, "format": "int-quantized", **others}


def bits_of(module: str, *targets: list[str]) -> int | None:
    found = Targets(weights_by_target(declared(*targets)), ()).of(module)
    return found.bits if found else None


@pytest.mark.parametrize(
    ("module", "targets", "bits"),
    [
        (Q, [["Linear"]], 2),
        (Q, [["Linear"], [Q]], 3),
        (Q, [["Linear"], ["re:.*q_proj"]], 3),
        (Q, [["re:.*q_proj"], [Q]], 3),
        (Q, [["re:model.*"], ["re:.*"]], 3),  # patterns go by the alphabet, as in the library
        (Q, [["Linear"], ["Linear"]], 3),  # the later of equal targets
        (Q, [["re:q_proj"], ["Embedding"]], None),  # patterns match from the start
        (Q, [["q_proj"]], None),
        (Q, [["LlamaAttention"], ["re:.*down_proj"]], None),
        ("model.embed_tokens", [["Linear"], ["Embedding"]], 3),
        ("model.embed_tokens", [["Linear"]], None),
        ("lm_head", [["Linear"]], 2),
        (DOWN, [["Linear"], ["re:.*layers\\.1\\..*"]], 3),
        (DOWN, [["Linear"], ["re:model\\.language_model\\.layers\\..*down.*"]], 3),  # of an image-text checkpoint
        (DOWN, [["Linear"], ["re:language_model\\.model\\.layers\\..*down.*"]], 3),
        (DOWN, [["Linear"], ["re:vision_model.*"]], 2),
    ],
)
def test_names_come_before_patterns_and_patterns_before_classes(
    module: str, targets: list[list[str]], bits: int | None
) -> None:
    assert bits_of(module, *targets) == bits


@pytest.mark.parametrize(
    ("ignored", "expected"),
    [(["lm_head"], []), ([Q], [Q]), (["re:.*self_attn.*"], [Q]), (["re:.*_proj$"], [Q, DOWN]), (["q_proj"], [])],
)
def test_modules_are_ignored_by_name_and_by_pattern(ignored: list[str], expected: list[str]) -> None:
    targets = Targets(weights_by_target(declared(["Linear"])), tuple(ignored))
    assert [module for module in (Q, DOWN) if targets.ignores(module)] == expected


def weights(**fields: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": fields}}}


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        (weights(num_bits=4, type="int", strategy="group", group_size=128), "w4a16 g128"),
        (weights(num_bits=8, type="int", strategy="channel"), "w8a16"),
        (weights(num_bits=8), "w8a16"),
        (weights(num_bits=4, group_size=64), "w4a16 g64"),
        (weights(num_bits=8, type="float", strategy="channel"), "fp8"),
        (weights(num_bits=8, type="float", strategy="block", block_structure=[128, 128]), "fp8 128x128"),
        (weights(num_bits=8, type="float", strategy="block", block_structure="64x32"), "fp8 64x32"),
        (weights(num_bits=4, type="float", strategy="tensor_group", group_size=16), "nvfp4"),
        (weights(num_bits=4, type="float", strategy="group", group_size=32), "mxfp4"),
        (declared(["re:.*mlp.*"], ["Linear"]), "w2a16 + w3a16"),
    ],
)
def test_a_label_names_the_format(fields: dict[str, Any], label: str) -> None:
    assert METHODS["compressed-tensors"](fields).label == f"compressed-tensors {label}"


def test_a_label_has_the_bits_of_activations() -> None:
    fields = weights(num_bits=8, type="int", strategy="channel")
    fields["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    assert METHODS["compressed-tensors"](fields).label == "compressed-tensors w8a8"


def test_a_declaration_may_be_nested_as_transformers_saves_it() -> None:
    nested = {"quant_method": "compressed-tensors", "quantization_config": weights(num_bits=8), "sparsity_config": {}}
    assert METHODS["compressed-tensors"](nested).label == "compressed-tensors w8a16"


def test_groups_of_activations_only_say_nothing_of_weights() -> None:
    fields = declared(["Linear"])
    fields["config_groups"]["attention"] = {"targets": ["LlamaAttention"], "input_activations": {"num_bits": 8}}
    assert weights_by_target(fields).keys() == {"Linear"}
