"""Declarations and tensors of MXFP4 and bitsandbytes that are not served, or do not fit."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.methods import METHODS
from engine.native.formats.quantized.methods import matrices_of as all_matrices
from services.models.files.tensor_headers import TensorHeader, tensor_headers
from tests.engine.native.formats.quantized.parts_in_memory import MODULE, codes_of, matrices_of, stored_parts
from tests.engine.native.formats.quantized.test_bitsandbytes import fields_of, float4_parts
from tests.engine.native.formats.quantized.test_mxfp4 import EXPERTS, parts_of

BNB = "bitsandbytes"
Parts = dict[str, torch.Tensor]
Change = Callable[[Parts], object]
STATE = "weight.quant_state.bitsandbytes__nf4"
W, E = f"{MODULE}.weight", EXPERTS

DECLARATIONS: list[tuple[str, dict[str, Any], str]] = [
    (BNB, {}, "its quantization (bitsandbytes) has neither of load_in_8bit and load_in_4bit"),
    (BNB, {"load_in_8bit": True, "load_in_4bit": True}, "has both of load_in_8bit and load_in_4bit"),
    (BNB, {"load_in_8bit": "yes"}, "its quantization has load_in_8bit 'yes', which is neither true nor false"),
    (BNB, {"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type 'int4', not nf4 or fp4: use a"),
    (BNB, {"load_in_4bit": True, "bnb_4bit_quant_type": ["nf4"]}, "bnb_4bit_quant_type ['nf4'], not nf4 or fp4"),
    (BNB, {"load_in_8bit": True, "llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules 'lm_head', which is no"),
    ("mxfp4", {"modules_to_not_convert": 3}, "modules_to_not_convert 3, which is no list of names"),
    ("mxfp4", {"kv_cache_scheme": {"num_bits": 8}}, "declares kv_cache_scheme, scales for a quantized KV cache"),
]


@pytest.mark.parametrize(("method", "fields", "message"), DECLARATIONS)
def test_declarations_that_are_not_served_are_refused(method: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnsupported, match=re.escape(message)):
        METHODS[method](fields)


def without(suffix: str) -> Change:
    return lambda parts: parts.pop(suffix)


def put(suffix: str, tensor: torch.Tensor) -> Change:
    return lambda parts: parts.__setitem__(suffix, tensor)


def text(content: bytes | str) -> Change:
    data = content.encode() if isinstance(content, str) else content
    return put(STATE, torch.tensor(list(data), dtype=torch.uint8))


def said(**fields: Any) -> Change:
    def change(parts: Parts) -> None:
        state = json.loads(bytes(parts[STATE].tolist())) | fields
        text(json.dumps({key: one for key, one in state.items() if one != "gone"}))(parts)

    return change


BYTES = torch.zeros(4, dtype=torch.uint8)
INT8: list[tuple[Change, str]] = [
    (without("SCB"), f"its files lack tensor {MODULE}.SCB, although they have {W}"),
    (without("weight"), f"its files lack tensor {W}, although they have {MODULE}.SCB"),
    (put("SCB", torch.zeros(5)), f"its tensor {MODULE}.SCB has shape [5], not [4]"),
    (put("SCB", torch.zeros(4, 1)), f"its tensor {MODULE}.SCB has shape [4, 1], not [4]"),
    (put("SCB", torch.zeros(4).half()), f"its tensor {MODULE}.SCB has type F16, not F32"),
    (put("weight", torch.zeros(4, 32)), f"its tensor {W} has type F32, not I8"),
    (put("weight", torch.zeros(128, dtype=torch.int8)), f"its tensor {W} has shape [128], not two dimensions"),
    (put("weight", torch.zeros(4, 0, dtype=torch.int8)), f"its tensor {W} has shape [4, 0], not two dimensions"),
    (put("weight_format", BYTES), f"its tensor {MODULE}.weight_format has shape [4], not []"),
]
FLOAT4: list[tuple[Change, str]] = [
    (without("weight"), f"its files lack tensor {W}, although they have {W}.absmax"),
    (without("weight.absmax"), f"its files lack tensor {W}.absmax, although they have {W}.nested_absmax"),
    (without("weight.quant_map"), f"its files lack tensor {W}.quant_map, although they have {W}.absmax"),
    (without("weight.nested_absmax"), f"its files lack tensor {W}.nested_absmax, although they have {W}.absmax"),
    (without("weight.nested_quant_map"), f"its files lack tensor {W}.nested_quant_map, although"),
    (without(STATE), f"its files lack tensor {W}.quant_state.bitsandbytes__nf4, although they have {W}.absmax"),
    (put("weight", torch.zeros(64, dtype=torch.int32)), f"its tensor {W} has type I32, not U8 or I8 or F16"),
    (put("weight", torch.zeros(8, 16, dtype=torch.uint8)), f"its tensor {W} has shape [8, 16], not [128, 1]"),
    (put("weight", torch.zeros(0, 1, dtype=torch.uint8)), f"its tensor {W} has shape [0, 1], not [1, 1]"),
    (put("weight.absmax", torch.zeros(4)), f"its tensor {W}.absmax has type F32, not U8"),
    (put("weight.absmax", BYTES[:, None]), f"its tensor {W}.absmax has shape [4, 1], not [4]"),
    (put("weight.nested_absmax", torch.zeros(0)), f"its tensor {W}.nested_absmax has shape [0], not [1]"),
    (put("weight.nested_quant_map", torch.zeros(16)), f"its tensor {W}.nested_quant_map has shape [16], not [256]"),
    (put("weight.quant_map", torch.zeros(256)), f"its tensor {W}.quant_map has shape [256], not [16]"),
    (put(STATE, torch.zeros(70_000, dtype=torch.uint8)), f"its tensor {W}.{STATE[7:]} has 70000 bytes, not a short"),
    (put(STATE, torch.zeros(9)), f"its tensor {W}.{STATE[7:]} has type F32, not U8"),
]
# What only the text says.
TEXTS: list[tuple[Change, str]] = [
    (text("{"), "is no JSON: Expecting property name"),
    (text(b"\xff\xfe\x00"), "is no JSON: "),
    (text("[" * 60_000), "is no JSON: maximum recursion depth exceeded"),
    (text('{"shape": ' * 5000 + "1" + "}" * 5000), "is no JSON: maximum recursion depth exceeded"),
    (text('{"blocksize": ' + "9" * 5000 + "}"), "is no JSON: Exceeds the limit"),
    (text("[1]"), "is no JSON object"),
    (text("null"), "is no JSON object"),
    (said(quant_type="fp4"), "has quant_type 'fp4', not nf4"),
    (said(quant_type="gone"), "has quant_type None, not nf4"),
    *((said(shape=shape), "not outputs and inputs") for shape in ("gone", [256], [4, 64, 1], [4, "64"], [-4, -64])),
    *((said(shape=shape), "not outputs and inputs") for shape in ([True, 256], [0, 64], {"4": 64}, [4.0, 64.0])),
    (said(shape=[4, 65]), "has shape [4, 65], but the codes have 128 bytes"),
    (said(shape=[1 << 62, 1 << 62]), "but the codes have 128 bytes"),
    *((said(blocksize=size), "but there are 4 scales of 256 numbers") for size in ("gone", 0, -64, 63, 32, 1.5, True)),
    *((said(blocksize=size), "but there are 4 scales of 256 numbers") for size in (1 << 40, "64", [64])),
    (said(nested_blocksize=1), "has nested_blocksize 1, but there are 1 scales of 4 numbers"),
    (said(nested_blocksize="gone"), "has nested_blocksize None, but there are 1 scales of 4 numbers"),
    *((said(nested_offset=one), "not a number") for one in ("gone", "0.5", None, True, [1.0], float("nan"), 1e39)),
    (said(nested_offset=float("inf")), "has nested_offset inf, not a number"),
]
MXFP4: list[tuple[Change, str]] = [
    *((without(name), f"its files lack tensor {E}.{name}, although they have {E}.") for name in parts_of(1, 32, 32)),
    (put("down_proj", torch.zeros(2, 32, 64)), f"its files have tensor {E}.down_proj twice: as it is, and in blocks"),
    (put("gate_up_proj_blocks", torch.zeros(2, 64, 2, 16)), f"its tensor {E}.gate_up_proj_blocks has type F32, not U8"),
    *(
        (
            put("gate_up_proj_blocks", torch.zeros(shape, dtype=torch.uint8)),
            f"its tensor {E}.gate_up_proj_blocks has shape {list(shape)}, not experts, outputs, groups and 16",
        )
        for shape in ((2, 64, 32), (2, 96, 2, 16), (2, 64, 2, 8), (0, 64, 2, 16), (1 << 30, 0, 2, 16), (2, 0, 2, 16))
    ),
    (
        put("gate_up_proj_blocks", torch.zeros(5000, 64, 1, 16, dtype=torch.uint8)),
        f"its tensor {E}.gate_up_proj_blocks has 5000 experts, more than 4096",
    ),
    (
        put("gate_up_proj_scales", torch.zeros(2, 64, 1, dtype=torch.uint8)),
        f"its tensor {E}.gate_up_proj_scales has shape [2, 64, 1], not [2, 64, 2]",
    ),
    (
        put("down_proj_blocks", torch.zeros(3, 64, 1, 16, dtype=torch.uint8)),
        f"its tensor {E}.down_proj_blocks has shape [3, 64, 1, 16], not [2, 64, 1, 16]",
    ),
    (
        put("down_proj_scales", torch.zeros(2, 64, 1)),
        f"its tensor {E}.down_proj_scales has type F32, not U8",
    ),
]


def int8_parts() -> Parts:
    layout = torch.tensor(0, dtype=torch.uint8)
    return {"weight": torch.zeros(4, 32, dtype=torch.int8), "SCB": torch.ones(4), "weight_format": layout}


CASES = [
    *((BNB, fields_of("int8"), MODULE, int8_parts, *one) for one in INT8),
    *((BNB, fields_of("nf4"), MODULE, lambda: float4_parts(4, 64, 64, nested=256), *one) for one in FLOAT4),
    *(("mxfp4", {}, EXPERTS, lambda: parts_of(2, 64, 32), *one) for one in MXFP4),
]


@pytest.mark.parametrize(("method", "fields", "module", "made", "change", "message"), CASES)
def test_tensors_that_do_not_fit_are_refused_by_their_name_from_headers_alone(
    method: str, fields: dict[str, Any], module: str, made: Callable[[], Parts], change: Change, message: str
) -> None:
    parts = made()
    change(parts)
    with pytest.raises(ModelUnsupported, match=re.escape(message)):
        matrices_of(method, fields, stored_parts(parts, module))


@pytest.mark.parametrize(("change", "message"), TEXTS)
def test_a_text_that_is_damaged_or_contradicts_the_tensors_is_refused_by_its_name(change: Change, message: str) -> None:
    parts = float4_parts(4, 64, 64, nested=256)
    change(parts)
    codes = codes_of(BNB, fields_of("nf4"), parts)
    for use in (lambda: codes.shape, lambda: codes.values(0, 1)):
        with pytest.raises(ModelUnsupported, match=re.escape(f"its tensor {W}.{STATE[7:]} ")) as refused:
            use()
        assert message in str(refused.value)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("change", "message"), TEXTS[:8])
def test_a_check_of_headers_reads_the_text(tmp_path: Path, change: Change, message: str) -> None:
    parts = float4_parts(4, 64, 64, nested=256)
    save_file({f"{MODULE}.{suffix}": one for suffix, one in parts.items()}, tmp_path / "fine.safetensors")
    scheme = METHODS[BNB](fields_of("nf4"))
    [(_, fine)] = all_matrices(scheme, tensor_headers(tmp_path / "fine.safetensors")).coded.items()
    assert fine.codes.shape == (4, 64)
    change(parts)
    save_file({f"{MODULE}.{suffix}": one for suffix, one in parts.items()}, tmp_path / "model.safetensors")
    [(_, wrong)] = all_matrices(scheme, tensor_headers(tmp_path / "model.safetensors")).coded.items()
    with pytest.raises(ModelUnsupported, match=re.escape(message)):
        _ = wrong.codes.shape


def test_headers_give_short_texts_only() -> None:
    for header in (TensorHeader("U8", (4,)), TensorHeader("F32", (4,), Path("x")), TensorHeader("U8", (70_000,))):
        with pytest.raises(TypeError):
            header[...]


VALUES: list[tuple[str, dict[str, Any], Parts, Change, str]] = [
    (
        BNB,
        fields_of("int8"),
        int8_parts(),
        put("weight_format", torch.tensor(2, dtype=torch.uint8)),
        f"its tensor {MODULE}.weight_format is 2, the layout of a GPU's tiles: only 0 is served",
    ),
    (
        BNB,
        fields_of("nf4"),
        float4_parts(4, 64, 64),
        put("weight.quant_map", torch.linspace(-1, 1, 16)),
        f"its tensor {W}.quant_map has other numbers than those of nf4",
    ),
    (
        BNB,
        fields_of("nf4"),
        float4_parts(4, 64, 64),
        put("weight.quant_map", torch.full((16,), torch.nan)),
        f"its tensor {W}.quant_map has other numbers than those of nf4",
    ),
]


@pytest.mark.parametrize(("method", "fields", "parts", "change", "message"), VALUES)
def test_values_that_are_not_served_are_refused_when_they_are_read(
    method: str, fields: dict[str, Any], parts: Parts, change: Change, message: str
) -> None:
    given = dict(parts)
    change(given)
    codes = codes_of(method, fields, given)
    with pytest.raises(ModelUnsupported, match=re.escape(message)):
        codes.values(0, 1)


def test_an_exponent_of_mxfp4_that_is_no_number_is_refused_by_name() -> None:
    parts = parts_of(2, 32, 32)
    parts["gate_up_proj_scales"][1, 5, 0] = 255
    found = matrices_of("mxfp4", {}, stored_parts(parts, EXPERTS)).coded
    bad = found[f"{EXPERTS}.1.up_proj.weight"].codes  # row 2 of the ups
    for read in (bad.values, bad.grouped):
        with pytest.raises(ModelUnsupported, match=rf"{EXPERTS}\.gate_up_proj_scales has scales that are not finite$"):
            read(0, 32)
        assert read(3, 32) is not None
    assert found[f"{EXPERTS}.1.gate_proj.weight"].codes.grouped(0, 32) is not None


def test_codes_of_other_tensors_are_refused() -> None:
    other = {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2, dtype=torch.uint8)}
    for method, fields in ((BNB, fields_of("int8")), (BNB, fields_of("nf4")), ("mxfp4", {})):
        with pytest.raises(ModelUnsupported, match=r"up_proj\.weight has type U8, but no scales of it are known"):
            matrices_of(method, fields, stored_parts(other, "x"))


@pytest.mark.parametrize(
    ("name", "method"),
    [(f"{W}.quant_map", "bitsandbytes"), (f"{E}.down_proj_blocks", "MXFP4"), (f"{E}.gate_up_proj_blocks", "MXFP4")],
)
def test_parts_without_a_declaration_say_what_they_look_like(name: str, method: str) -> None:
    with pytest.raises(ModelUnsupported, match=f"weights quantized by {method}, but config.json has no"):
        all_matrices(None, {name: TensorHeader("U8", (4,))})


@given(content=st.binary(min_size=1, max_size=80))
def test_any_other_text_is_refused(content: bytes) -> None:
    parts = float4_parts(2, 64, 64)
    text(content)(parts)
    codes = codes_of(BNB, fields_of("nf4"), parts)
    with pytest.raises(ModelUnsupported):
        codes.values(0, 2)
