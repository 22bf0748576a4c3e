"""Matrices in GPTQ and AWQ: their values, and the packed form that has exactly these."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from engine.errors import ModelUnsupported
from engine.native.formats import coded
from engine.native.formats.coded import CodedMatrix, Codes
from engine.native.formats.grouped import GroupedWeights
from engine.native.formats.quantized.declared import Declared
from engine.native.formats.quantized.methods import scheme_by
from engine.native.formats.quantized.scheme import Matrices
from tests.engine.native.formats.quantized.writers import Written, write_awq, write_gptq

MODULE = "model.layers.0.self_attn.q_proj"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Floats = npt.NDArray[np.float32]


def random_weights(outputs: int, inputs: int, seed: int) -> Floats:
    """Return weights of which some outputs are all positive: their zeros are 0."""
    random = np.random.default_rng(seed)
    weights = random.standard_normal((outputs, inputs), dtype=np.float32)
    positive = random.random(outputs) < 0.3
    weights[positive] = np.abs(weights[positive])
    return weights


def matrices_of(place: Path, parts: dict[str, torch.Tensor], method: str, fields: dict[str, Any]) -> Matrices:
    """Write the parts of one matrix to a file, and read them as a declaration says."""
    save_file({f"{MODULE}.{suffix}": one for suffix, one in parts.items()}, place)
    file = safe_open(place, framework="pt")
    stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    return scheme_by(Declared(method, fields, "config.json")).matrices(stored)


def codes_of(place: Path, parts: dict[str, torch.Tensor], method: str, fields: dict[str, Any]) -> Codes:
    return matrices_of(place, parts, method, fields).coded[f"{MODULE}.weight"].codes


def whole_tiles(groups: npt.NDArray[np.generic]) -> bool:
    """Return whether each group of inputs is whole 32 inputs."""
    return all(count % 32 == 0 for count in np.unique(groups, return_counts=True)[1])


def check_exact(codes: Codes, written: Written, begin: int, end: int, *, packs: bool) -> None:
    expected = written.values[begin:end]
    assert codes.shape == written.values.shape
    np.testing.assert_array_equal(codes.values(begin, end), expected, strict=True)
    found = codes.grouped(begin, end)
    assert (found is not None) == packs
    if found is None:
        return
    np.testing.assert_array_equal(found.dense(), expected, strict=True)
    check_form(found)
    middle = (begin + end) // 2
    spans = ((begin, middle), (middle, end)) if middle > begin else ((begin, end),)
    parts = [one for span in spans if (one := codes.grouped(*span))]
    np.testing.assert_array_equal(coded.joined(parts).dense(), expected, strict=True)


def check_form(found: GroupedWeights) -> None:
    """Check that kernels know the form."""
    outputs, inputs = found.shape
    assert found.bits in (4, 8)
    assert found.zero == 1 << (found.bits - 1)
    assert found.codes.max(initial=0) < 1 << found.bits
    assert found.minimums is found.levels is found.table is found.output_scales is None
    assert found.scales.shape == (outputs, inputs // found.group)
    if found.group == inputs and found.zeros is None:
        assert found.order is None
        return
    assert found.group == 32
    assert found.zeros is None or found.zeros.shape == found.scales.shape
    half = found.scales.astype(np.float16).astype(np.float32)
    assert np.array_equal(half, found.scales) or not (np.ascontiguousarray(found.scales).view(np.uint32) & 65535).any()
    if found.order is not None:
        assert sorted(found.order) == list(range(inputs))


@st.composite
def rows(draw: st.DrawFn, outputs: int) -> tuple[int, int]:
    begin = draw(st.integers(0, outputs - 1))
    return begin, draw(st.integers(begin + 1, outputs))


@given(data=st.data())
def test_gptq_is_read_exactly(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    bits = draw(st.sampled_from((2, 3, 4, 8)))
    outputs = draw(st.sampled_from((32, 64)) if bits == 3 else st.integers(1, 70))
    inputs = draw(st.sampled_from((32, 64, 96, 128, 256) if bits == 3 else (16, 32, 48, 64, 96, 128, 256)))
    group = draw(st.sampled_from((-1, 7, 8, 32, 64, 96, 128, 100_000)))
    sym, ordered = draw(st.booleans()), draw(st.booleans())
    version, dtype = draw(st.sampled_from((1, 2))), draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 1000))
    order = np.random.default_rng(seed).permutation(inputs) if ordered else None
    weights = random_weights(outputs, inputs, seed)
    written = write_gptq(weights, bits, group, version=version, sym=sym, order=order, dtype=dtype)
    fields = {"bits": bits, "group_size": group, "desc_act": ordered, "sym": sym}
    fields |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    codes = codes_of(tmp_path_factory.getbasetemp() / "gptq.safetensors", written.parts, "gptq", fields)
    one_group = group == -1 or group >= inputs
    half = dtype != torch.float32 or (one_group and (sym or bits < 4))
    packs = inputs % 32 == 0 and whole_tiles(written.parts["g_idx"].numpy()) and half
    check_exact(codes, written, *draw(rows(outputs)), packs=packs)


@given(data=st.data())
def test_awq_is_read_exactly(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    draw = data.draw
    outputs = 8 * draw(st.integers(1, 9))
    group = draw(st.sampled_from((-1, 8, 32, 64, 128)))
    inputs = max(group, 16) * draw(st.integers(1, 3))
    sym, dtype = draw(st.booleans()), draw(st.sampled_from(DTYPES))
    written = write_awq(random_weights(outputs, inputs, draw(st.integers(0, 1000))), group, sym=sym, dtype=dtype)
    fields = {"bits": 4, "group_size": group, "zero_point": not sym, "version": "gemm"}
    codes = codes_of(tmp_path_factory.getbasetemp() / "awq.safetensors", written.parts, "awq", fields)
    one_group = group in (-1, inputs)
    half = dtype != torch.float32 or (one_group and sym)
    packs = inputs % 32 == 0 and (one_group or group % 32 == 0) and half
    check_exact(codes, written, *draw(rows(outputs)), packs=packs)
