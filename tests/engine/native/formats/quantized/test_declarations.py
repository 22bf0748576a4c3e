"""Declarations of GPTQ, AWQ and AutoRound: what is read as they say, and what is refused by field or tensor."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.declared import Declared
from engine.native.formats.quantized.methods import matrices_of, scheme_by
from engine.native.formats.quantized.scheme import Matrices
from services.models.files.tensor_headers import TensorHeader
from tests.engine.native.formats.quantized.handles import MODULE, ReadTensor
from tests.engine.native.formats.quantized.writers import write_awq, write_gptq

Headers = dict[str, tuple[str, tuple[int, ...]]]

FOUR: dict[str, Any] = {"bits": 4, "group_size": 32}
ROUND = FOUR | {"packing_format": "auto_round:auto_gptq"}
GPTQ: Headers = {
    "qweight": ("I32", (8, 64)),
    "qzeros": ("I32", (2, 8)),
    "scales": ("F16", (2, 64)),
    "g_idx": ("I32", (64,)),
}
AWQ: Headers = {"qweight": ("I32", (64, 8)), "qzeros": ("I32", (2, 8)), "scales": ("F16", (2, 64))}
SLOW = ".*?" * 9 + r"[^\w.]"


def headers(parts: Headers, module: str = MODULE) -> dict[str, TensorHeader]:
    """Return tensors of which nothing can be read."""
    return {f"{module}.{suffix}": TensorHeader(*one) for suffix, one in parts.items()}


def matrices(method: str, fields: dict[str, Any], parts: Headers, *modules: str) -> Matrices:
    stored = {name: one for module in modules or (MODULE,) for name, one in headers(parts, module).items()}
    return matrices_of(scheme_by(Declared(method, fields, "config.json")), stored)


@pytest.mark.parametrize(
    ("method", "fields", "label"),
    [
        ("gptq", FOUR, "gptq int4 g32"),
        ("gptq", {"bits": 8, "group_size": -1}, "gptq int8 by output"),
        ("gptq", FOUR | {"desc_act": True, "checkpoint_format": "gptq_v2"}, "gptq int4 g32 act-order"),
        ("gptq", FOUR | {"dynamic": {"-:lm_head": {}}}, "gptq int4 g32"),
        ("gptq", FOUR | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq int4 g32 mixed"),
        ("awq", FOUR | {"version": "GEMM"}, "awq int4 g32"),
        ("awq", {"w_bit": 4, "q_group_size": 128, "zero_point": True}, "awq int4 g128"),
        ("auto-round", ROUND, "auto-round int4 g32"),
        ("intel/auto-round", ROUND | {"extra_config": {"a": {"bits": 8}}}, "auto-round int4 g32 mixed"),
    ],
)
def test_labels_say_bits_and_groups(method: str, fields: dict[str, Any], label: str) -> None:
    assert scheme_by(Declared(method, fields, "config.json")).label == label


@pytest.mark.parametrize(
    ("method", "fields", "reason"),
    [
        ("gptq", {}, "bits None, which is no integer"),
        ("gptq", FOUR | {"bits": "4"}, "bits '4', which is no integer"),
        ("gptq", FOUR | {"bits": 4.0}, "bits 4.0, which is no integer"),
        ("gptq", FOUR | {"bits": True}, "bits True, which is no integer"),
        ("gptq", FOUR | {"bits": 5}, "bits 5, not 2 or 3 or 4 or 8"),
        ("gptq", {"bits": 4}, "group_size None, which is no integer"),
        ("gptq", FOUR | {"group_size": 0}, "group_size 0, which is neither -1 nor positive"),
        ("gptq", FOUR | {"group_size": -5}, "group_size -5, which is neither -1 nor positive"),
        ("gptq", FOUR | {"desc_act": 1}, "desc_act 1, which is neither true nor false"),
        ("gptq", FOUR | {"sym": "yes"}, "sym 'yes', which is neither true nor false"),
        ("gptq", FOUR | {"checkpoint_format": "marlin"}, r"\(gptq in the format marlin\), which is not served: use a"),
        ("gptq", FOUR | {"format": "bitblas"}, r"\(gptq in the format bitblas\), which is not served"),
        ("gptq", FOUR | {"checkpoint_format": "gptq_p", "format": "gptq"}, r"\(gptq in the format gptq_p\)"),
        ("gptq", FOUR | {"checkpoint_format": ["gptq"]}, r"\(gptq in the format \['gptq'\]\), which is not served"),
        ("gptq", FOUR | {"is_marlin_format": True}, r"\(gptq in the format marlin\), which is not served"),
        ("gptq", FOUR | {"rotation": "hadamard"}, r"\(gptq with the rotation hadamard\), which is not served"),
        ("gptq", FOUR | {"dynamic": ["a"]}, "dynamic, which must map patterns to objects"),
        ("gptq", FOUR | {"dynamic": {"a": 4}}, "dynamic, which must map patterns to objects"),
        ("gptq", FOUR | {"dynamic": {"a": {"bits": 6}}}, "bits 6, not 2 or 3 or 4 or 8"),
        ("gptq", FOUR | {"dynamic": {"a": {"group_size": "x"}}}, "group_size 'x', which is no integer"),
        ("awq", FOUR | {"bits": 8}, "bits 8, not 4"),
        ("awq", FOUR | {"version": "gemv"}, r"\(awq in the format gemv\), which is not served: use a"),
        ("awq", FOUR | {"version": "gemv_fast"}, r"\(awq in the format gemv_fast\), which is not served"),
        ("awq", FOUR | {"version": "exllama"}, r"\(awq in the format exllama\), which is not served"),
        ("awq", FOUR | {"version": 4}, r"\(awq in the format 4\), which is not served"),
        ("awq", FOUR | {"backend": "llm-awq"}, r"\(awq in the format llm-awq\), which is not served"),
        ("awq", FOUR | {"zero_point": 0}, "zero_point 0, which is neither true nor false"),
        ("awq", FOUR | {"modules_to_not_convert": "gate"}, "modules_to_not_convert 'gate', which is no list of names"),
        ("auto-round", FOUR, r"\(auto-round without packing_format\), which is not served"),
        (
            "auto-round",
            FOUR | {"packing_format": "auto_round:fp8"},
            r"\(auto-round in the packing format auto_round:fp8",
        ),
        ("auto-round", FOUR | {"packing_format": {}}, r"\(auto-round without packing_format\)"),
        ("auto-round", ROUND | {"data_type": "mx_fp"}, r"\(auto-round with the data type mx_fp\), which is not served"),
        ("auto-round", ROUND | {"act_bits": 8}, r"\(auto-round with activations of 8 bits\), which is not served"),
        ("auto-round", ROUND | {"rotation_config": {}}, r"\(auto-round with rotation_config\), which is not served"),
        ("auto-round", ROUND | {"extra_config": {"a": 4}}, "extra_config, which must map modules to objects"),
        ("auto-round", ROUND | {"extra_config": {"a": {"data_type": "fp"}}}, "with the data type fp"),
        ("auto-round", ROUND | {"bits": 6}, "bits 6, not 2 or 3 or 4 or 8"),
        ("auto-round", FOUR | {"packing_format": "auto_round:auto_awq", "bits": 8}, "bits 8, not 4"),
    ],
)
def test_a_declaration_is_refused_by_field(method: str, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelUnsupported, match=reason):
        scheme_by(Declared(method, fields, "config.json"))


def without(parts: Headers, suffix: str) -> Headers:
    return {name: one for name, one in parts.items() if name != suffix}


@pytest.mark.parametrize(
    ("method", "fields", "parts", "reason"),
    [
        (
            "gptq",
            FOUR,
            without(GPTQ, "qweight"),
            f"its files lack tensor {MODULE}.qweight, although they have {MODULE}.q",
        ),
        ("gptq", FOUR, without(GPTQ, "qzeros"), f"its files lack tensor {MODULE}.qzeros, although they have"),
        ("gptq", FOUR, without(GPTQ, "scales"), f"its files lack tensor {MODULE}.scales, although they have"),
        ("awq", FOUR, without(AWQ, "qzeros"), f"its files lack tensor {MODULE}.qzeros, although they have"),
        (
            "gptq",
            FOUR,
            GPTQ | {"weight": ("F16", (64, 64))},
            f"tensor {MODULE}.weight twice: as it is, and in the parts",
        ),
        (
            *("gptq", FOUR | {"desc_act": True}, without(GPTQ, "g_idx")),
            f"its files lack tensor {MODULE}.g_idx, although desc_act is true",
        ),
        ("gptq", FOUR, GPTQ | {"qweight": ("I64", (8, 64))}, f"its tensor {MODULE}.qweight has type I64, not I32"),
        ("gptq", FOUR, GPTQ | {"qweight": ("I32", (512,))}, f"{MODULE}.qweight has shape [512], not two dimensions"),
        ("gptq", FOUR, GPTQ | {"qweight": ("I32", (0, 64))}, f"{MODULE}.qweight has shape [0, 64], not two dimensions"),
        ("gptq", FOUR, GPTQ | {"qzeros": ("I32", (2, 64))}, f"{MODULE}.qzeros has shape [2, 64], not [2, 8]"),
        ("gptq", FOUR, GPTQ | {"qzeros": ("I8", (2, 8))}, f"{MODULE}.qzeros has type I8, not I32"),
        ("gptq", FOUR, GPTQ | {"scales": ("F16", (64, 2))}, f"{MODULE}.scales has shape [64, 2], not [2, 64]"),
        ("gptq", FOUR, GPTQ | {"scales": ("U8", (2, 64))}, f"{MODULE}.scales has type U8, not F16 or BF16 or F32"),
        ("gptq", FOUR, GPTQ | {"g_idx": ("I32", (63,))}, f"{MODULE}.g_idx has shape [63], not [64]"),
        ("gptq", FOUR, GPTQ | {"g_idx": ("F32", (64,))}, f"{MODULE}.g_idx has type F32, not I32"),
        (
            "gptq",
            FOUR | {"bits": 8},
            GPTQ,
            "scales has shape [2, 64], not [1, 64] as with its quantization's bits 8 and group",
        ),
        ("gptq", FOUR | {"bits": 3}, GPTQ, f"{MODULE}.qweight has shape [8, 64], but 3 bits take whole 3 words"),
        ("gptq", FOUR | {"group_size": 7}, GPTQ, f"{MODULE}.scales has shape [2, 64], not [10, 64]"),
        ("gptq", FOUR | {"group_size": 10**30}, GPTQ, f"{MODULE}.scales has shape [2, 64], not [1, 64]"),
        ("gptq", FOUR, AWQ, f"{MODULE}.scales has shape [2, 64], not [16, 8]"),
        ("awq", FOUR, GPTQ, f"{MODULE}.qweight has 8 inputs, no multiple of group_size 32"),
        ("awq", FOUR | {"group_size": 48}, AWQ, f"{MODULE}.qweight has 64 inputs, no multiple of group_size 48"),
        ("awq", FOUR | {"group_size": 128}, AWQ, f"{MODULE}.qweight has 64 inputs, no multiple of group_size 128"),
        ("awq", FOUR, AWQ | {"scales": ("F16", (2, 8))}, f"{MODULE}.scales has shape [2, 8], not [2, 64]"),
        (
            "awq",
            FOUR,
            AWQ | {"g_idx": ("I32", (64,))},
            f"{MODULE}.g_idx looks like a part of weights quantized by GPTQ",
        ),
        (
            "gptq",
            FOUR,
            GPTQ | {"SCB": ("F32", (64,))},
            "quantized by bitsandbytes, but its files declare gptq int4 g32",
        ),
        (
            "gptq",
            FOUR | {"dynamic": {"-:.*q_proj": {}}},
            GPTQ,
            f"{MODULE}.qweight is quantized, but its quantization exc",
        ),
        ("gptq", FOUR | {"dynamic": {"+:(": {"bits": 8}}}, GPTQ, "the pattern '(', which is none"),
        ("gptq", FOUR | {"dynamic": {"(" * 4000: {}}}, GPTQ, "which is none"),
        ("gptq", FOUR | {"dynamic": {"a" * 5000: {}}}, GPTQ, "has a pattern of 5000 characters"),
        (
            "gptq",
            FOUR | {"dynamic": {"a{1000000000}": {}}},
            GPTQ,
            "the pattern 'a{1000000000}', which repeats too often",
        ),
        ("gptq", FOUR | {"dynamic": {"((a{99}){99}){99}": {}}}, GPTQ, "which repeats too often"),
        ("gptq", FOUR | {"dynamic": {SLOW: {"bits": 8}}}, GPTQ, f"the pattern {SLOW!r}, which takes too long"),
        (
            "auto-round",
            ROUND | {"extra_config": {"q_proj": {"bits": 16}}},
            GPTQ,
            f"{MODULE}.qweight is quantized, but its",
        ),
        ("auto-round", ROUND | {"extra_config": {"[": {"bits": 8}}}, GPTQ, "the pattern '[', which is none"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_tensor(
    method: str, fields: dict[str, Any], parts: Headers, reason: str
) -> None:
    with pytest.raises(ModelUnsupported, match=re.escape(reason)):
        matrices(method, fields, parts)


def test_a_million_patterns_are_refused() -> None:
    with pytest.raises(ModelUnsupported, match="has 1000001 patterns for 1 mod"):
        matrices("gptq", FOUR | {"dynamic": {f"a{one}": {} for one in range(1_000_001)}}, GPTQ)


@pytest.mark.parametrize(("wrong", "group"), [(-1, -1), (2, 2), (2**31 - 1, 2**31 - 1), (-(2**31), -(2**31))])
def test_a_group_index_out_of_range_is_refused_by_tensor(wrong: int, group: int) -> None:
    written = write_gptq(np.ones((8, 64), np.float32), 4, 32)
    written.parts["g_idx"][17] = wrong
    stored = {f"{MODULE}.{suffix}": ReadTensor(one) for suffix, one in written.parts.items()}
    codes = scheme_by(Declared("gptq", FOUR, "config.json")).matrices(stored).coded[f"{MODULE}.weight"].codes
    for read in (codes.grouped, codes.values):
        with pytest.raises(ModelUnsupported, match=rf"its tensor {MODULE}\.g_idx has group {group} of 2 groups"):
            read(0, 8)


def test_heads_and_experts_are_quantized_like_other_modules() -> None:
    modules = ("lm_head", "model.layers.3.mlp.experts.12.gate_proj", "model.layers.3.mlp.experts.12.down_proj")
    for method, parts in (("gptq", GPTQ), ("awq", AWQ)):
        found = matrices(method, FOUR | {"lm_head": True}, parts, *modules)
        assert {name: one.codes.shape for name, one in found.coded.items()} == {
            f"{module}.weight": (64, 64) for module in modules
        }
        assert found.parts == {f"{module}.{suffix}" for module in modules for suffix in parts}


def test_other_tensors_stay_as_they_are() -> None:
    others = {
        **headers({"bias": ("F16", (64,))}),
        **headers({"weight": ("F16", (64,))}, "model.norm"),
        **headers({"scales": ("F16", (64,))}, "model.other"),
    }
    found = matrices_of(scheme_by(Declared("gptq", FOUR, "config.json")), headers(GPTQ) | others)
    assert not found.parts & others.keys()


DYNAMIC = {
    "-:.*k_proj": {},
    "+:.*q_proj": {"bits": 8, "group_size": -1},
    r"model\.layers\.0\.": {"group_size": 64},
    ".*": {"bits": 2},
}
EIGHT: Headers = {"qweight": ("I32", (16, 64)), "qzeros": ("I32", (1, 16)), "scales": ("F16", (1, 64))}
LARGER: Headers = {"qweight": ("I32", (16, 64)), "qzeros": ("I32", (2, 8)), "scales": ("F16", (2, 64))}
TWO: Headers = {"qweight": ("I32", (4, 64)), "qzeros": ("I32", (2, 4)), "scales": ("F16", (2, 64))}


def test_the_first_pattern_that_matches_the_start_of_a_name_gives_its_fields() -> None:
    stored = {
        **headers(EIGHT, "model.layers.0.self_attn.q_proj"),
        **headers(LARGER, "model.layers.0.mlp.up_proj"),
        **headers(TWO, "model.layers.1.mlp.up_proj"),
        **headers({"weight": ("F16", (64, 64))}, "model.layers.1.self_attn.k_proj"),
    }
    found = matrices_of(scheme_by(Declared("gptq", FOUR | {"dynamic": DYNAMIC}, "config.json")), stored)
    assert {name: one.codes.shape for name, one in found.coded.items()} == {
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.mlp.up_proj.weight": (64, 128),
        "model.layers.1.mlp.up_proj.weight": (64, 64),
    }


def test_extra_fields_of_a_name_precede_those_of_patterns() -> None:
    extra = {
        ".*self_attn.*": {"bits": 2},
        "model.layers.0.self_attn.q_proj": {"bits": 8, "group_size": -1},
        "lm_head": {"bits": 16},
        "mlp": {},
        "up_proj": {"group_size": 64},
    }
    stored = {
        **headers(EIGHT, "model.layers.0.self_attn.q_proj"),
        **headers(TWO, "model.layers.0.self_attn.k_proj"),
        **headers(LARGER, "model.layers.0.mlp.up_proj"),
        **headers({"weight": ("F16", (64, 64))}, "lm_head"),
    }
    found = matrices_of(scheme_by(Declared("auto-round", ROUND | {"extra_config": extra}, "config.json")), stored)
    assert len(found.coded) == 3


@pytest.mark.parametrize(
    ("packing", "version"),
    [
        ("auto_round:auto_gptq", 1),
        ("auto_round:gptq", 1),
        ("auto_gptq", 1),
        ("auto_round", 2),
        ("auto_round:gptqmodel", 2),
        ("auto_round:auto_awq", 0),
        ("auto_round:awq", 0),
        ("auto_awq", 0),
    ],
)
def test_packing_formats_of_auto_round_are_those_of_gptq_and_awq(packing: str, version: int) -> None:
    weights = np.random.default_rng(1).standard_normal((32, 64), dtype=np.float32)
    written = write_gptq(weights, 4, 32, version=version, sym=False) if version else write_awq(weights, 32)
    stored = {f"{MODULE}.{suffix}": ReadTensor(one) for suffix, one in written.parts.items()}
    scheme = scheme_by(Declared("auto-round", FOUR | {"packing_format": packing}, "config.json"))
    found = scheme.matrices(stored).coded[f"{MODULE}.weight"].codes
    np.testing.assert_array_equal(found.values(0, 32), written.values)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (GPTQ, "by GPTQ, but config.json has no quantization_config, and quantize_config.json is missing"),
        (
            without(GPTQ, "g_idx"),
            "by GPTQ, but config.json has no quantization_config, and quantize_config.json is mis",
        ),
        (AWQ, "by AWQ, but config.json has no quantization_config, and quant_config.json is missing: without it"),
        (without(AWQ, "scales"), "by GPTQ or AWQ, but config.json has no quantization_config: without it"),
        ({"weight_packed": ("I32", (64, 8))}, "by compressed-tensors, but config.json has no quantization_config: wit"),
        ({"weight_scale_inv": ("F32", (1, 1))}, "by FP8, but config.json has no quantization_config: without it"),
        ({"SCB": ("F32", (64,))}, "by bitsandbytes, but config.json has no quantization_config: without it"),
        ({"qweight": ("I32", ()), "scales": ("F16", ())}, "by GPTQ or AWQ, but config.json has no quantization_config"),
    ],
)
def test_parts_without_a_declaration_are_refused_with_the_method_that_they_look_like(
    parts: Headers, reason: str
) -> None:
    with pytest.raises(
        ModelUnsupported, match=rf"its tensor {MODULE}\.\w+ looks like a part of weights quantized {reason}"
    ):
        matrices_of(None, headers(parts))


def test_scales_that_are_not_finite_stay_so_in_the_values() -> None:
    written = write_awq(np.ones((8, 64), np.float32), 32, dtype=torch.float16)
    written.parts["scales"][1, 3] = float("nan")
    stored = {f"{MODULE}.{suffix}": ReadTensor(one) for suffix, one in written.parts.items()}
    codes = scheme_by(Declared("awq", FOUR, "config.json")).matrices(stored).coded[f"{MODULE}.weight"].codes
    assert np.isnan(codes.values(0, 8)[3, 32:]).all()
    grouped = codes.grouped(0, 8)
    assert grouped is not None
    assert np.isnan(grouped.scales).any()


NAMES = (
    *(
        "bits",
        "group_size",
        "desc_act",
        "sym",
        "checkpoint_format",
        "format",
        "is_marlin_format",
        "rotation",
        "dynamic",
    ),
    *("w_bit", "q_group_size", "version", "backend", "zero_point", "modules_to_not_convert"),
    *("packing_format", "data_type", "act_bits", "extra_config", "super_bits"),
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(("gptq", "gemm", "auto_round", "int", "-:(")),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from((*NAMES, "a.*", "-:q")), inner, max_size=3)
    ),
    max_leaves=6,
)
HEADERS = st.dictionaries(
    st.sampled_from((*GPTQ, "weight")),
    st.tuples(st.sampled_from(("I32", "F16", "F8_E4M3", "?")), st.lists(st.sampled_from((0, 1, 2, 8, 64)), max_size=3)),
)


@given(
    method=st.sampled_from(("gptq", "awq", "auto-round")),
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES),
    changed=HEADERS,
    sound=st.booleans(),
)
def test_whatever_is_declared_is_read_or_refused(
    method: str, fields: dict[str, Any], changed: dict[str, tuple[str, list[int]]], sound: bool
) -> None:
    known = ROUND if sound else {}
    parts: Headers = (GPTQ if sound else {}) | {name: (kind, tuple(shape)) for name, (kind, shape) in changed.items()}
    try:
        found = matrices(method, {**fields, **known}, parts)
    except ModelUnsupported:
        return
    assert found.parts >= {f"{MODULE}.{suffix}" for suffix in parts if suffix.startswith("q")}
