"""Declarations and tensors of compressed-tensors, FP8 and ModelOpt that are not served, or do not fit."""

import re
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.fields import shown
from engine.native.formats.quantized.methods import METHODS
from tests.engine.native.formats.quantized.compressed_writers import (
    fields_of,
    float8,
    float_scales,
    integer_fields,
    write_float4,
    write_integers,
)
from tests.engine.native.formats.quantized.parts_in_memory import MODULE, codes_of, matrices_of, stored_parts

CT = "compressed-tensors"
NOT_SERVED = "its weights are quantized (compressed-tensors, {}), which is not served: use a GGUF file"
KV = (
    "its quantization declares {0}, scales for a quantized KV cache, which is not served: remove {0}, then K and V are "
    "stored unquantized, or quantized by --kv-dtype int8"
)


def weights(form: str = "pack-quantized", **fields: Any) -> dict[str, Any]:
    return fields_of(fields, form)


FINE = integer_fields(4, 32)
DECLARATIONS: list[tuple[str, dict[str, Any], str]] = [
    (CT, {}, "its quantization has no config_groups"),
    (CT, {"config_groups": []}, "its quantization has no config_groups"),
    (CT, {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16, which is no group of weights"),
    (CT, {"config_groups": {"a": {"weights": 4}}}, "config_groups.a.weights, which are no fields"),
    (CT, {"config_groups": {"a": {"weights": None}}}, "its quantization has config_groups without weights"),
    (CT, {"config_groups": {"a": {"targets": "Linear", "weights": {}}}}, "targets 'Linear', which is no list of names"),
    (CT, weights(num_bits="4"), "its quantization has num_bits '4', which is no integer"),
    *(
        (
            CT,
            weights(num_bits=bits, type="int", group_size=128),
            f"{bits} bits in pack-quantized), which is not served: ",
        )
        for bits in (1, 2, 3, 5, 6, 7, 16)
    ),
    (CT, weights("int-quantized", num_bits=16), NOT_SERVED.format("int of 16 bits")),
    (CT, weights(num_bits=6, type="float"), NOT_SERVED.format("float of 6 bits")),
    (CT, weights(num_bits=8, type="complex"), NOT_SERVED.format("complex of 8 bits")),
    (CT, weights(num_bits=8, type="float", symmetric=False), NOT_SERVED.format("asymmetric float")),
    (CT, weights(num_bits=8, symmetric="no"), "symmetric 'no', which is neither true nor false"),
    (
        CT,
        weights(num_bits=8, strategy="block", block_structure=[8, 8]),
        NOT_SERVED.format("int of 8 bits with strategy block"),
    ),
    (CT, weights(num_bits=8, strategy="token"), NOT_SERVED.format("int of 8 bits with strategy token")),
    (CT, weights(num_bits=4, strategy="group"), NOT_SERVED.format("strategy group with group_size None")),
    (CT, weights(num_bits=4, strategy="group", group_size=-2), NOT_SERVED.format("strategy group with group_size -2")),
    (CT, weights(num_bits=4, group_size=[32]), "its quantization has group_size [32], which is no integer"),
    (
        CT,
        weights(num_bits=4, type="float", strategy="group", group_size=64),
        NOT_SERVED.format("float of 4 bits with strategy group and group_size 64"),
    ),
    *(
        (
            CT,
            weights(num_bits=8, type="float", strategy="block", block_structure=block),
            NOT_SERVED.format(f"block_structure {shown(block)}"),
        )
        for block in (None, [128], [0, 128], [128, -1], "128", "128xx128", "9" * 5000 + "x1", [True, 1])
    ),
    *(
        (CT, weights(form, num_bits=4, group_size=32), NOT_SERVED.format(f"format {form}"))
        for form in ("marlin-24", "sparse-24-bitmask", "mxfp6-pack-quantized", "dense", "fakequant")
    ),
    (CT, FINE | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, KV.format("kv_cache_scheme")),
    (
        CT,
        FINE | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        NOT_SERVED.format("sparsity_config with format sparse-24-bitmask"),
    ),
    (CT, FINE | {"sparsity_config": "yes"}, NOT_SERVED.format("sparsity_config with format yes")),
    (
        CT,
        FINE | {"transform_config": {"config_groups": {}}},
        NOT_SERVED.format("transform_config: activations that are rotated before a product"),
    ),
    (
        CT,
        FINE | {"moe_sparsity_config": {"method": "prune"}},
        NOT_SERVED.format("moe_sparsity_config: experts that are pruned or constant"),
    ),
    (
        CT,
        FINE | {"quantization_status": "calibration"},
        "quantization_status calibration), which is not served: save it compressed",
    ),
    (CT, FINE | {"ignore": "lm_head"}, "its quantization has ignore 'lm_head', which is no list of names"),
    ("fp8", {"kv_cache_scheme": "static"}, KV.format("kv_cache_scheme")),
    ("fp8", {"expert_dtype": "fp4"}, "with expert_dtype fp4, which is not served: use a GGUF file"),
    *(
        ("fp8", {"weight_block_size": block}, f"weight_block_size {block!r}, which are no outputs and inputs")
        for block in ([128], [0, 128], "128", [True, 1], [128.0, 1], 128, [128, 128, 1])
    ),
    ("modelopt", {}, "(modelopt, quant_algo None), which is not served: use a checkpoint in FP8 or NVFP4, a GGUF file"),
    ("modelopt", {"quant_algo": "W4A8_AWQ"}, "(modelopt, quant_algo W4A8_AWQ), which is not served: "),
    ("modelopt", {"quantization": {"quant_algo": ["FP8"]}}, "(modelopt, quant_algo ['FP8']), which is not served: "),
    (
        "modelopt",
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "INT8_SQ"}},
        },
        "(modelopt, quant_algo INT8_SQ), which is not served: ",
    ),
    (
        "modelopt",
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        KV.format("kv_cache_quant_algo"),
    ),
    ("modelopt", {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8}}, KV.format("kv_cache_scheme")),
]


@pytest.mark.parametrize(("method", "fields", "message"), DECLARATIONS)
def test_a_declaration_is_refused_by_its_field(method: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=re.escape(message)):
        METHODS[method](fields)


def random() -> np.random.Generator:
    return np.random.default_rng(0)


INT4 = write_integers(random(), (16, 64), 4, 32).parts
ASYMMETRIC = write_integers(random(), (16, 64), 4, 32, symmetric=False).parts
INT8 = write_integers(random(), (16, 64), 8, None, packed=False).parts
ORDERED = write_integers(random(), (16, 64), 4, 32, order=True).parts
FLOAT8 = {"weight": float8(random(), 200, 64), "weight_scale": float_scales(random(), (2, 1), torch.float32)}
_CODES, _SCALES, _ = write_float4(random(), (16, 64), 16)
NVFP4 = {"weight_packed": _CODES, "weight_scale": _SCALES, "weight_global_scale": torch.ones(1)}
MODELOPT = {"weight": _CODES, "weight_scale": _SCALES, "weight_scale_2": torch.ones(())}
_CODES, _SCALES, _ = write_float4(random(), (16, 64), 32)
MXFP4 = {"weight_packed": _CODES, "weight_scale": _SCALES}

BLOCKS = weights("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128])
FIELDS: dict[str, tuple[str, dict[str, Any], dict[str, torch.Tensor]]] = {
    "int4": (CT, integer_fields(4, 32), INT4),
    "asymmetric": (CT, integer_fields(4, 32, symmetric=False), ASYMMETRIC),
    "int8": (CT, integer_fields(8, None), INT8),
    "ordered": (CT, integer_fields(4, 32), ORDERED),
    "blocks": (CT, BLOCKS, FLOAT8),
    "nvfp4": (
        CT,
        weights("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        NVFP4,
    ),
    "mxfp4": (CT, weights("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), MXFP4),
    "fp8": ("fp8", {}, FLOAT8),
    "fp8 of modelopt": ("modelopt", {"quant_algo": "FP8"}, FLOAT8),
    "nvfp4 of modelopt": ("modelopt", {"quant_algo": "NVFP4"}, MODELOPT),
}
_GONE = torch.empty(0)
TENSORS: list[tuple[str, dict[str, torch.Tensor], str]] = [
    ("int4", {"weight_scale": _GONE}, "its files lack tensor {}.weight_scale"),
    ("int4", {"weight_packed": _GONE}, "its files lack tensor {}.weight or {}.weight_packed"),
    ("int4", {"weight": torch.ones(16, 64)}, "its files have both tensor {}.weight and {}.weight_packed"),
    ("int4", {"weight_packed": INT4["weight_packed"].long()}, "{}.weight_packed has type I64, not I32"),
    (
        "int4",
        {"weight_packed": INT4["weight_packed"].flatten()},
        "{}.weight_packed has shape [128], not two dimensions",
    ),
    ("int4", {"weight_packed": INT4["weight_packed"][:0]}, "{}.weight_packed has shape [0, 8], not two dimensions"),
    (
        "int4",
        {"weight_packed": INT4["weight_packed"][:, :7]},
        "{}.weight_packed has 56 inputs, no multiple of group_size 32",
    ),
    ("int4", {"weight_packed": INT4["weight_packed"][:, :4]}, "{}.weight_scale has shape [16, 2], not [16, 1]"),
    (
        "int4",
        {"weight_scale": INT4["weight_scale"].double().float().to(torch.float8_e4m3fn)},
        "{}.weight_scale has type F8_E4M3, not BF16 or F16 or F32",
    ),
    ("int4", {"weight_shape": torch.tensor([16, 64, 1])}, "{}.weight_shape has shape [3], not [2]"),
    ("int4", {"weight_g_idx": torch.zeros(63, dtype=torch.int32)}, "{}.weight_g_idx has shape [63], not [64]"),
    (
        "asymmetric",
        {"weight_zero_point": _GONE},
        "its files lack tensor {}.weight_zero_point, but its quantization is not symmetric",
    ),
    (
        "asymmetric",
        {"weight_zero_point": ASYMMETRIC["weight_zero_point"][:1]},
        "{}.weight_zero_point has shape [1, 2], not [2, 2]",
    ),
    (
        "asymmetric",
        {"weight_zero_point": torch.zeros(16, 2, dtype=torch.int8)},
        "{}.weight_zero_point has type I8, not I32",
    ),
    ("int8", {"weight": torch.ones(16, 64, dtype=torch.bfloat16)}, "{}.weight has type BF16, not I8"),
    ("int8", {"weight_scale": torch.ones(4, 1)}, "{}.weight_scale has shape [4, 1], not [16, 1]"),
    ("int8", {"weight_scale": _GONE}, "its files lack tensor {}.weight_scale"),
    ("blocks", {"weight_scale": torch.ones(3, 1)}, "{}.weight_scale has shape [3, 1], not [2, 1]"),
    ("blocks", {"weight": FLOAT8["weight"].view(torch.float8_e5m2)}, "{}.weight has type F8_E5M2, not F8_E4M3"),
    ("blocks", {"weight": FLOAT8["weight"][:0]}, "{}.weight has shape [0, 64], not two dimensions"),
    ("nvfp4", {"weight_global_scale": _GONE}, "its files lack tensor {}.weight_global_scale"),
    ("nvfp4", {"weight_global_scale": torch.ones(2)}, "{}.weight_global_scale has shape [2], not [1]"),
    ("nvfp4", {"weight_scale": NVFP4["weight_scale"].float()}, "{}.weight_scale has type F32, not F8_E4M3"),
    ("nvfp4", {"weight_packed": NVFP4["weight_packed"][:, :30]}, "{}.weight_packed has 60 inputs, no multiple of 16"),
    ("nvfp4", {"weight_packed": NVFP4["weight_packed"].view(torch.int8)}, "{}.weight_packed has type I8, not U8"),
    ("mxfp4", {"weight_scale": MXFP4["weight_scale"][:, :1]}, "{}.weight_scale has shape [16, 1], not [16, 2]"),
    ("fp8", {"weight_scale": _GONE}, "its files lack tensor {}.weight_scale_inv or {}.weight_scale"),
    ("fp8", {"weight": _GONE}, "its files lack tensor {}.weight"),
    ("fp8", {"weight": torch.ones(200, 64)}, "{}.weight has type F32, not F8_E4M3"),
    (
        "fp8",
        {"weight_scale": torch.ones(2, 1, dtype=torch.int32)},
        "{}.weight_scale has type I32, not BF16 or F16 or F32 or F8_E8M0 or U8",
    ),
    ("fp8", {"weight": FLOAT8["weight"][None]}, "{}.weight has shape [1, 200, 64], not two dimensions"),
    ("nvfp4 of modelopt", {"weight_scale": _GONE}, "its files lack tensor {}.weight_scale"),
    ("nvfp4 of modelopt", {"weight_scale_2": _GONE}, "{}.weight has type U8, not F8_E4M3"),
    (
        "nvfp4 of modelopt",
        {"pre_quant_scale": torch.ones(64)},
        "{}.pre_quant_scale scales inputs before they are multiplied",
    ),
    ("fp8 of modelopt", {"other": FLOAT8["weight"]}, "{}.other has type F8_E4M3, but no scales of it are known"),
    ("int4", {"other": torch.ones(4, 4, dtype=torch.int8)}, "{}.other has type I8, but no scales of it are known"),
]


def changed(parts: dict[str, torch.Tensor], changes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {suffix: one.contiguous() for suffix, one in (parts | changes).items() if one is not _GONE}


@pytest.mark.parametrize(("kind", "changes", "message"), TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name_before_they_are_read(
    kind: str, changes: dict[str, torch.Tensor], message: str
) -> None:
    method, fields, parts = FIELDS[kind]
    stored = stored_parts(changed(parts, changes))
    with pytest.raises(ModelUnsupported, match=re.escape(message.format(MODULE, MODULE))):
        matrices_of(method, fields, stored)
    assert not any(one.read for one in stored.values())


def nan_at(scales: torch.Tensor, value: float = torch.nan) -> torch.Tensor:
    found = scales.clone()
    found.flatten()[1] = value
    return found


VALUES: list[tuple[str, dict[str, torch.Tensor], str]] = [
    ("int4", {"weight_shape": torch.tensor([16, 63])}, "{}.weight_shape says [16, 63], not [16, 64]"),
    (
        "int4",
        {"weight_shape": torch.tensor([-1, 2**60])},
        "{}.weight_shape says [-1, 1152921504606846976], not [16, 64]",
    ),
    ("int4", {"weight_scale": nan_at(INT4["weight_scale"])}, "{}.weight_scale has scales that are not finite"),
    (
        "int8",
        {"weight_scale": nan_at(INT8["weight_scale"], torch.inf)},
        "{}.weight_scale has scales that are not finite",
    ),
    (
        "ordered",
        {"weight_g_idx": torch.zeros(64, dtype=torch.int32)},
        "{}.weight_g_idx does not have 32 inputs in each group",
    ),
    (
        "ordered",
        {"weight_g_idx": nan_at(ORDERED["weight_g_idx"], 2)},
        "{}.weight_g_idx does not have 32 inputs in each group",
    ),
    (
        "ordered",
        {"weight_g_idx": nan_at(ORDERED["weight_g_idx"], -1)},
        "{}.weight_g_idx does not have 32 inputs in each group",
    ),
    ("blocks", {"weight_scale": nan_at(FLOAT8["weight_scale"])}, "{}.weight_scale has scales that are not finite"),
    ("mxfp4", {"weight_scale": nan_at(MXFP4["weight_scale"], 255)}, "{}.weight_scale has scales that are not finite"),
    (
        "mxfp4",
        {"weight_scale": nan_at(MXFP4["weight_scale"], 255).view(torch.float8_e8m0fnu)},
        "{}.weight_scale has scales that are not finite",
    ),
    (
        "nvfp4",
        {"weight_scale": nan_at(NVFP4["weight_scale"].view(torch.uint8), 127).view(torch.float8_e4m3fn)},
        "{}.weight_scale has scales that are not finite",
    ),
    ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "{}.weight_global_scale is 0.0, which is no scale"),
    ("nvfp4", {"weight_global_scale": torch.tensor([torch.inf])}, "{}.weight_global_scale is inf, which is no scale"),
    ("nvfp4", {"weight_global_scale": torch.tensor([1e-42])}, "{}.weight_global_scale is "),  # 1 / 1e-42 is infinite
    ("nvfp4 of modelopt", {"weight_scale_2": torch.tensor(torch.nan)}, "{}.weight_scale_2 is nan, which is no scale"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), VALUES)
def test_values_that_contradict_others_are_refused_by_name(
    kind: str, changes: dict[str, torch.Tensor], message: str
) -> None:
    method, fields, parts = FIELDS[kind]
    codes = codes_of(method, fields, changed(parts, changes))
    for read in (codes.values, codes.grouped):
        if kind != "blocks" or read == codes.values:
            with pytest.raises(ModelUnsupported, match=re.escape(message.format(MODULE))):
                read(0, codes.shape[0])


def test_a_module_with_codes_that_is_ignored_or_no_target_is_refused() -> None:
    stored = stored_parts(INT4)
    for fields, message in (
        (
            FINE | {"ignore": ["re:.*q_proj"]},
            f"its tensor {MODULE}.weight_packed has quantized weights, but its quantization ignores {MODULE}",
        ),
        (
            {"config_groups": {"a": {"targets": ["re:.*k_proj"], "weights": {"num_bits": 4, "group_size": 32}}}},
            f"its tensor {MODULE}.weight_packed has quantized weights, but no targets of its quantization fit",
        ),
        (
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3, "group_size": 32}}}},
            f"3 bits in {MODULE}.weight_packed), which is not served",
        ),
    ):
        with pytest.raises(ModelUnsupported, match=re.escape(message)):
            matrices_of(CT, fields, stored)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("re:(", "which is none"),
        ("re:(x|xx)+$(?<!x)", "which takes too long"),
        ("re:" + "a" * 5000, "a pattern of"),
    ],
)
def test_a_pattern_that_is_none_or_takes_too_long_is_refused(pattern: str, message: str) -> None:
    module = "x" * 200
    group = {"targets": [pattern, "Linear"], "weights": {"num_bits": 4, "group_size": 32}}
    with pytest.raises(ModelUnsupported, match=message):
        METHODS[CT]({"config_groups": {"a": group}}).matrices(stored_parts(INT4, module))


def test_more_patterns_than_can_be_compared_are_refused() -> None:
    group = {"targets": [f"re:{one}" for one in range(200_000)], "weights": {"num_bits": 4, "group_size": 32}}
    stored = {name: one for layer in range(20) for name, one in stored_parts(INT4, f"model.layers.{layer}.q").items()}
    with pytest.raises(ModelUnsupported, match="its quantization has too many patterns for 20 modules: 200000"):
        METHODS[CT]({"config_groups": {"a": group}}).matrices(stored)


EXPERTS = "model.layers.0.mlp.experts"
GATES, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (DOWN, None, f"its files lack tensor {DOWN}"),
        (f"{GATES}_scale_inv", None, f"its files lack tensor {GATES}_scale_inv"),
        (DOWN, (3, 32, 16), f"its tensor {DOWN} has shape [3, 32, 16], which does not fit its experts"),
        (DOWN, (32, 16), f"its tensor {DOWN} has shape [32, 16], which does not fit its experts"),
        (DOWN, (2, 32, 15), f"its tensor {DOWN} does not fit {GATES}"),
        (GATES, (2, 32, 0), f"its tensor {GATES} has shape [2, 32, 0], which does not fit its experts"),
        (f"{DOWN}_scale_inv", (2, 3, 1), f"its tensor {DOWN}_scale_inv has type F8_E4M3"),
    ],
)
def test_tensors_of_all_experts_that_do_not_fit_are_refused(
    name: str, tensor: tuple[int, ...] | None, message: str
) -> None:
    parts = {
        "gate_up_proj": float8(random(), 2, 32, 32),
        "gate_up_proj_scale_inv": torch.ones(2, 1, 1),
        "down_proj": float8(random(), 2, 32, 16),
        "down_proj_scale_inv": torch.ones(2, 1, 1),
    }
    suffix = name.rpartition(".")[2]
    parts = {key: one for key, one in parts.items() if key != suffix}
    if tensor is not None:
        parts[suffix] = float8(random(), *tensor)
    with pytest.raises(ModelUnsupported, match=re.escape(message)):
        METHODS["fp8"]({}).matrices(stored_parts(parts, EXPERTS))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
_NAMES = ("num_bits", "type", "strategy", "group_size", "symmetric", "block_structure", "actorder", "dynamic")
_OTHERS = ("config_groups", "format", "ignore", "sparsity_config", "transform_config", "quantization_status")
_ELSE = ("weight_block_size", "expert_dtype", "quant_algo", "quantization", "quantized_layers", "quantization_config")


@given(
    kind=st.sampled_from(sorted(FIELDS)),
    inner=st.dictionaries(st.sampled_from(_NAMES), JSON, max_size=2),
    outer=st.dictionaries(st.sampled_from((*_OTHERS, *_ELSE)), JSON, max_size=2),
)
def test_any_field_is_served_or_refused(kind: str, inner: dict[str, Any], outer: dict[str, Any]) -> None:
    method, fields, parts = FIELDS[kind]
    if method == CT:
        group = fields["config_groups"]["group_0"]
        fields = fields | {"config_groups": {"group_0": group | {"weights": group["weights"] | inner}}}
    read_or_refused(method, fields | outer, parts)


TYPES = (torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e4m3fn)


@given(
    kind=st.sampled_from(sorted(FIELDS)),
    place=st.integers(0, 5),
    shape=st.lists(st.integers(0, 70), max_size=4),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 255),
)
def test_any_tensor_is_served_or_refused(
    kind: str, place: int, shape: list[int], dtype: torch.dtype, seed: int
) -> None:
    method, fields, parts = FIELDS[kind]
    suffix = sorted(parts)[place % len(parts)]
    values = torch.from_numpy(np.random.default_rng(seed).integers(0, 120, shape)) if shape else torch.tensor(seed)
    read_or_refused(method, fields, parts | {suffix: values.to(dtype)})


def read_or_refused(method: str, fields: dict[str, Any], parts: dict[str, torch.Tensor]) -> None:
    with suppress(ModelUnsupported):
        found = METHODS[method](fields).matrices(stored_parts(parts))
        for one in found.coded.values():
            outputs, inputs = one.codes.shape
            assert one.codes.values(0, outputs).shape == (outputs, inputs)
            one.codes.grouped(0, outputs)
