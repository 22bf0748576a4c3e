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

from engine.native.formats import coded
from engine.native.formats.coded import StoredCodes
from engine.native.formats.grouped import GroupedWeights
from engine.native.formats.quantized.declared import Declared
from engine.native.formats.quantized.methods import scheme_by
from engine.native.grouped_strips import format_of
from tests.engine.native.formats.quantized.handles import MODULE, ReadTensor
from tests.engine.native.formats.quantized.writers import Written, less_one, write_awq, write_gptq

DTYPES = (torch.float16, torch.bfloat16, torch.float32)

Floats = npt.NDArray[np.float32]


def random_weights(outputs: int, inputs: int, seed: int) -> Floats:
    """Return weights of which some outputs are all positive: their zeros are 0."""
    random = np.random.default_rng(seed)
    weights = random.standard_normal((outputs, inputs), dtype=np.float32)
    positive = random.random(outputs) < 0.3
    weights[positive] = np.abs(weights[positive])
    return weights


def codes_of(place: Path, parts: dict[str, torch.Tensor], method: str, fields: dict[str, Any]) -> StoredCodes:
    """Write the parts of one matrix to a file, and read them as a declaration says."""
    save_file({f"{MODULE}.{suffix}": one for suffix, one in parts.items()}, place)
    file: Any = safe_open(place, framework="pt")
    stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    return scheme_by(Declared(method, fields, "config.json")).matrices(stored).coded[f"{MODULE}.weight"].codes


def whole_tiles(groups: npt.NDArray[np.generic]) -> bool:
    """Return whether each group of inputs is whole 32 inputs."""
    return all(count % 32 == 0 for count in np.unique(groups, return_counts=True)[1])


def check_exact(codes: StoredCodes, written: Written, begin: int, end: int, *, packs: bool | None) -> None:
    """Check outputs against what was written; `packs` says whether they have a packed form, None if both may be."""
    expected = written.values[begin:end]
    assert codes.shape == written.values.shape
    np.testing.assert_array_equal(codes.values(begin, end), expected, strict=True)
    found = codes.grouped(begin, end)
    assert packs is None or (found is not None) == packs
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
    assert format_of(found) >= 0
    outputs, inputs = found.shape
    assert found.bits in (4, 8)
    assert found.zero == 1 << (found.bits - 1)
    assert found.codes.max(initial=0) < 1 << found.bits
    assert all(one is None for one in (found.minimums, found.levels, found.table, found.output_scales))
    assert found.scales.shape == (outputs, inputs // found.group)
    if found.group == inputs and found.zeros is None:
        assert found.order is None
        return  # scales stay float32
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
    fields: dict[str, Any] = {"bits": bits, "group_size": group, "desc_act": ordered, "sym": sym}
    fields |= {"checkpoint_format": "gptq_v2"} if version == 2 else {}
    codes = codes_of(tmp_path_factory.getbasetemp() / "gptq.safetensors", written.parts, "gptq", fields)
    one_group = group == -1 or group >= inputs
    tiles = inputs % 32 == 0 and whole_tiles(written.parts["g_idx"].numpy())
    # Scales in float32 may be exact in 16 bits by chance, and zeros in the middle.
    sure = dtype != torch.float32 or (one_group and (sym or bits < 4))
    packs = None if tiles and not sure else tiles
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
    tiles = inputs % 32 == 0 and (one_group or group % 32 == 0)
    packs = None if tiles and not (dtype != torch.float32 or (one_group and sym)) else tiles
    check_exact(codes, written, *draw(rows(outputs)), packs=packs)


WEIGHTS = random_weights(64, 256, 3)


def parts_read(
    method: str, parts: dict[str, torch.Tensor], fields: dict[str, Any]
) -> tuple[StoredCodes, list[ReadTensor]]:
    """Return the codes of one matrix in memory, and its tensors, which count what is read."""
    stored = {f"{MODULE}.{suffix}": ReadTensor(one) for suffix, one in parts.items()}
    scheme = scheme_by(Declared(method, fields, "config.json"))
    return scheme.matrices(stored).coded[f"{MODULE}.weight"].codes, list(stored.values())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_only_the_words_of_the_outputs_are_read(method: str) -> None:
    written = write_gptq(WEIGHTS, 4, 64, sym=False) if method == "gptq" else write_awq(WEIGHTS, 64)
    codes, tensors = parts_read(method, written.parts, {"bits": 4, "group_size": 64})
    assert codes.grouped(16, 24) is not None  # also what is decided once for a matrix
    before = sum(one.numbers for one in tensors)
    assert codes.grouped(16, 24) is not None
    weights, groups = 8 * 256, 8 * 4
    assert sum(one.numbers for one in tensors) - before <= weights // 8 + groups + 4 * 4  # 32 zeros are read together


def test_zeros_of_version_1_are_less_by_one_also_where_they_are_zero() -> None:
    zeros = np.array([[0, 8, 0, 0, 15, 1, 2, 0] * 4])
    words = less_one(zeros, 4)
    assert int(words[0, 0]) & 0xFFFFFFFF == (0x02_1F_00_80 - 0x11_11_11_11) % 2**32
    parts = write_gptq(WEIGHTS[:32, :32], 4, 32, sym=False).parts | {"qzeros": words}
    found = parts_read("gptq", parts, {"bits": 4, "group_size": 32})[0].grouped(0, 32)
    assert found is not None
    assert found.zeros is not None
    np.testing.assert_array_equal(found.zeros, zeros.T)


def test_a_group_index_of_zeros_means_groups_in_order() -> None:
    written = write_gptq(WEIGHTS, 4, 64)
    written.parts["g_idx"].zero_()
    codes, _ = parts_read("gptq", written.parts, {"bits": 4, "group_size": 64})
    np.testing.assert_array_equal(codes.values(0, 64), written.values)


def test_a_group_index_is_needed_only_for_another_order() -> None:
    written = write_gptq(WEIGHTS, 4, 64)
    del written.parts["g_idx"]
    codes, _ = parts_read("gptq", written.parts, {"bits": 4, "group_size": 64})
    np.testing.assert_array_equal(codes.values(0, 64), written.values)


def test_groups_are_sorted_stably() -> None:
    order = np.random.default_rng(0).permutation(256)
    written = write_gptq(WEIGHTS, 4, 64, order=order)
    found = parts_read("gptq", written.parts, {"bits": 4, "group_size": 64, "desc_act": True})[0].grouped(0, 64)
    assert found is not None
    assert found.order is not None
    for group in np.split(found.order, 4):
        assert (np.diff(group) > 0).all()


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_matrix_has_zeros_by_group_only_where_some_are_not_in_the_middle(method: str) -> None:
    write = write_gptq if method == "gptq" else write_awq
    for sym in (True, False):
        written = write(WEIGHTS, group=64, sym=sym)
        found = parts_read(method, written.parts, {"bits": 4, "group_size": 64, "sym": not sym})[0].grouped(0, 8)
        assert found is not None
        assert (found.zeros is None) == sym


def test_scales_in_float32_that_are_no_halves_are_not_packed() -> None:
    for scales, packs in (([1.0, 2**-20], True), ([2.0**100, 2.0**-100], True), ([1.0 + 2**-11, 1.0], False)):
        written = write_gptq(WEIGHTS[:, :64], 4, 32, dtype=torch.float32)
        written.parts["scales"][:] = torch.tensor(scales)[:, None]
        codes, _ = parts_read("gptq", written.parts, {"bits": 4, "group_size": 32})
        assert (codes.grouped(0, 64) is not None) == packs
