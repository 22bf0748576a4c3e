"""Experts in MXFP4: the values that transformers gives them, one by one and joined for its modules."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.native.formats.coded import CodedMatrix
from engine.native.formats.experts import joined_experts
from tests.engine.native.formats.quantized.parts_in_memory import matrices_of, stored_parts

EXPERTS = "model.layers.3.mlp.experts"


def parts_of(experts: int, hidden: int, inner: int, seed: int = 0, largest: int = 245) -> dict[str, torch.Tensor]:
    """Return random parts of a layer by suffix. Larger exponents make infinite values."""
    random = np.random.default_rng(seed)
    shapes = {"gate_up_proj": (experts, 2 * inner, hidden // 32), "down_proj": (experts, hidden, inner // 32)}
    found = {}
    for name, shape in shapes.items():
        found[f"{name}_blocks"] = torch.from_numpy(random.integers(0, 256, (*shape, 16), dtype=np.uint8))
        found[f"{name}_scales"] = torch.from_numpy(random.integers(0, largest + 1, shape, dtype=np.uint8))
    return found


@given(
    experts=st.integers(1, 3), hidden=st.sampled_from([32, 96]), inner=st.sampled_from([32, 64]), seed=st.integers(0)
)
def test_values_are_those_of_transformers(experts: int, hidden: int, inner: int, seed: int) -> None:
    parts = parts_of(experts, hidden, inner, seed)
    expected = {
        name: convert_moe_packed_tensors(parts[f"{name}_blocks"], parts[f"{name}_scales"], dtype=torch.float32)
        for name in ("gate_up_proj", "down_proj")
    }
    found = matrices_of("mxfp4", {}, stored_parts(parts, EXPERTS))
    assert found.parts == {f"{EXPERTS}.{name}" for name in parts}
    for expert in range(experts):
        both, down = expected["gate_up_proj"][expert].T, expected["down_proj"][expert].T
        for part, values in {"gate": both[0::2], "up": both[1::2], "down": down}.items():
            codes = found.coded[f"{EXPERTS}.{expert}.{part}_proj.weight"].codes
            assert codes.shape == values.shape
            np.testing.assert_array_equal(codes.values(0, len(values)), values.numpy(), strict=True)
            np.testing.assert_array_equal(codes.values(3, 5), values[3:5].numpy())
            grouped = codes.grouped(0, len(values))
            assert grouped is not None
            assert (grouped.bits, grouped.group, grouped.table is not None) == (4, 32, True)
            np.testing.assert_array_equal(grouped.dense(), values.numpy())
            assert not (grouped.scales.view(np.uint32) & 0xFFFF).any()  # exact in bfloat16
    matrices = {name: CodedMatrix(one.codes, torch.float32, one.place) for name, one in found.coded.items()}
    joined = joined_experts(matrices, torch.float32)
    assert joined.keys() == {f"{EXPERTS}.{name}" for name in expected}
    for name, values in expected.items():
        assert joined[f"{EXPERTS}.{name}"].get_shape() == list(values.shape)
        assert torch.equal(joined[f"{EXPERTS}.{name}"][...], values)


@pytest.mark.parametrize(("largest", "packed"), [(252, True), (253, False)])
def test_values_that_are_infinite_have_no_packed_form(largest: int, packed: bool) -> None:
    """They are refused where they are used, as dense ones."""
    parts = parts_of(1, 32, 32)
    parts["down_proj_scales"][0, 7, 0] = largest
    parts["down_proj_blocks"][0, 7, 0, 0] = 7
    codes = matrices_of("mxfp4", {}, stored_parts(parts, EXPERTS)).coded[f"{EXPERTS}.0.down_proj.weight"].codes
    assert (codes.grouped(0, 32) is not None) == packed
    assert bool(np.isfinite(codes.values(7, 8)).all()) == packed


def test_other_tensors_stay_as_they_are() -> None:
    others = {"gate_up_proj_bias": torch.zeros(2, 64), "down_proj_bias": torch.zeros(2, 32)}
    found = matrices_of("mxfp4", {}, stored_parts(parts_of(2, 32, 32) | others, EXPERTS))
    assert not [name for name in found.parts if name.endswith("bias")]
    assert matrices_of("mxfp4", {}, stored_parts(others, EXPERTS)).coded == {}
