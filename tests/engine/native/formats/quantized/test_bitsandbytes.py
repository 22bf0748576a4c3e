"""Matrices of bitsandbytes: exactly the values that their layouts say, in pieces of rows, for all sizes of blocks."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.native.formats.quantized.parts_in_memory import (
    MODULE,
    check_exact,
    codes_of,
    matrices_of,
    stored_parts,
)
from tests.engine.native.formats.quantized.twins_experts import _TABLES, in_4_bits

STORAGE = ("uint8", "int8", "bfloat16", "float16", "float32", "float64")


def float4_parts(
    outputs: int, inputs: int, block: int, *, kind: str = "nf4", storage: str = "uint8", nested: int = 0, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Return random parts of a matrix by suffix; `nested`: so many scales have one in common."""
    random = np.random.default_rng(seed)
    size = torch.empty(0, dtype=getattr(torch, storage)).element_size()
    count, blocks = -(-outputs * inputs // 2), -(-outputs * inputs // block)
    data = torch.from_numpy(random.integers(0, 256, -(-count // size) * size, dtype=np.uint8))
    state: dict[str, Any] = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [outputs, inputs]}
    scales = torch.from_numpy(random.uniform(0.1, 2, blocks).astype(np.float32))
    parts = {"weight": data.view(getattr(torch, storage))[:, None], "weight.quant_map": _TABLES[kind].clone()}
    if nested:
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": 0.75}
        scales = torch.from_numpy(random.integers(0, 256, blocks, dtype=np.uint8))
        parts["weight.nested_absmax"] = torch.rand(-(-blocks // nested))
        parts["weight.nested_quant_map"] = torch.linspace(-1, 1, 256)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts | {"weight.absmax": scales, f"weight.quant_state.bitsandbytes__{kind}": text}


def fields_of(kind: str) -> dict[str, Any]:
    return {"load_in_8bit": True} if kind == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": kind}


@given(
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 70)),
    block=st.sampled_from([1, 3, 32, 64, 128]),
    kind=st.sampled_from(["nf4", "fp4"]),
    nested=st.sampled_from([0, 1, 5, 256]),
    storage=st.sampled_from(STORAGE),
    seed=st.integers(0, 2**32),
)
def test_4_bits_have_the_values_of_their_layout(
    sizes: tuple[int, int], block: int, kind: str, nested: int, storage: str, seed: int
) -> None:
    outputs, inputs = sizes
    size = torch.empty(0, dtype=getattr(torch, storage)).element_size()
    if -(-outputs * inputs // 2) % size:  # such files cannot be written
        outputs *= 2 * size
    parts = float4_parts(outputs, inputs, block, kind=kind, storage=storage, nested=nested, seed=seed)
    codes = codes_of("bitsandbytes", fields_of(kind), parts)
    stored = {f"{MODULE}.{suffix}": one for suffix, one in parts.items()}
    state = json.loads(bytes(parts[f"weight.quant_state.bitsandbytes__{kind}"].tolist()))
    check_exact(codes, in_4_bits(f"{MODULE}.weight", stored, state).numpy(), form=None)


@given(outputs=st.integers(1, 9), inputs=st.sampled_from([1, 31, 32, 33, 96]), seed=st.integers(0, 2**32))
def test_8_bits_have_a_scale_for_each_output(outputs: int, inputs: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    weight = random.integers(-128, 128, (outputs, inputs), dtype=np.int8)
    scales = random.uniform(0.1, 9, outputs).astype(np.float32)
    parts = {
        "weight": torch.from_numpy(weight),
        "SCB": torch.from_numpy(scales),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    expected = weight.astype(np.float32) * (scales / np.float32(127))[:, None]
    form = None if inputs % 32 else (8, 0, False, False, False, False)
    check_exact(codes_of("bitsandbytes", fields_of("int8"), parts), expected, form=form)
    del parts["weight_format"]  # of older files
    check_exact(codes_of("bitsandbytes", fields_of("int8"), parts), expected, form=form)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_a_table_in_four_digits_stands_for_the_whole_one(kind: str) -> None:
    parts = float4_parts(4, 64, 64, kind=kind)
    expected = codes_of("bitsandbytes", fields_of(kind), parts).values(0, 4)
    parts["weight.quant_map"] = parts["weight.quant_map"].round(decimals=4)
    np.testing.assert_array_equal(codes_of("bitsandbytes", fields_of(kind), parts).values(0, 4), expected)


def test_only_what_a_piece_of_rows_needs_is_read() -> None:
    stored = stored_parts(float4_parts(512, 64, 64, nested=256))
    codes = matrices_of("bitsandbytes", fields_of("nf4"), stored).coded[f"{MODULE}.weight"].codes
    codes.values(100, 102)
    assert stored[f"{MODULE}.weight"].read == 64
    assert stored[f"{MODULE}.weight.absmax"].read == 2
    assert stored[f"{MODULE}.weight.nested_absmax"].read == 4
