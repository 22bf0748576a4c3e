"""Matrices of compressed-tensors: their values, and the packed form that has exactly these."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.native.formats.quantized.compressed_writers import (
    by_block,
    fields_of,
    float8,
    float_scales,
    integer_fields,
    numbers,
    write_float4,
    write_integers,
)
from tests.engine.native.formats.quantized.parts_in_memory import (
    MODULE,
    Form,
    Written,
    check_exact,
    codes_of,
    matrices_of,
    stored_parts,
)

METHOD = "compressed-tensors"
HALVES = (torch.float16, torch.bfloat16)
SEEDS = st.integers(0, 2**32 - 1)


def integer_form(written: Written, bits: int, group: int | None, *, symmetric: bool) -> Form | None:
    """Return the form that kernels have for integers, None if they have none."""
    inputs = written.values.shape[1]
    if inputs % 32:
        return None
    if symmetric and group in (None, inputs):
        return bits, 0, False, False, False, False
    if written.parts["weight_scale"].dtype == torch.float32 or (group or 32) % 32:
        return None
    return bits, 32, not symmetric, False, False, "weight_g_idx" in written.parts and group not in (None, inputs)


@given(
    seed=SEEDS,
    outputs=st.integers(1, 21),
    groups=st.integers(1, 3),
    group=st.sampled_from([None, 8, 16, 32, 64, 96, 128]),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
    dtype=st.sampled_from([*HALVES, torch.float32]),
    order=st.booleans(),
    packed=st.booleans(),
)
def test_integers_have_the_values_that_were_written(
    seed: int,
    outputs: int,
    groups: int,
    group: int | None,
    bits: int,
    symmetric: bool,
    dtype: torch.dtype,
    order: bool,
    packed: bool,
) -> None:
    inputs = groups * (group or 40)
    random = np.random.default_rng(seed)
    order = order and group is not None
    written = write_integers(
        random, (outputs, inputs), bits, group, symmetric=symmetric, dtype=dtype, order=order, packed=packed
    )
    codes = codes_of(METHOD, integer_fields(bits, group, symmetric=symmetric), written.parts)
    check_exact(codes, written.values, form=integer_form(written, bits if packed else 8, group, symmetric=symmetric))


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_scale_for_all_weights_is_that_of_each_output(dtype: torch.dtype, packed: bool) -> None:
    written = write_integers(np.random.default_rng(0), (1, 64), 8, None, dtype=dtype, packed=packed)
    many = write_integers(np.random.default_rng(1), (6, 64), 8, None, dtype=dtype, packed=packed)
    scale = written.parts["weight_scale"].flatten()
    codes = (many.values / many.parts["weight_scale"].float().numpy()).round()
    fields = fields_of({"num_bits": 8, "type": "int", "strategy": "tensor"}, "naive-quantized")
    for shape in ((), (1,), (1, 1)):
        found = codes_of(METHOD, fields, {**many.parts, "weight_scale": scale.reshape(shape)})
        check_exact(found, codes * scale.float().numpy(), form=(8, 0, False, False, False, False))


def test_a_zero_for_all_weights_is_subtracted() -> None:
    written = write_integers(np.random.default_rng(3), (5, 64), 8, None, packed=False)
    scale, zero = torch.tensor([0.25], dtype=torch.bfloat16), torch.tensor([-7], dtype=torch.int8)
    parts = {"weight": written.parts["weight"], "weight_scale": scale, "weight_zero_point": zero}
    fields = fields_of({"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": False}, "int-quantized")
    expected = (parts["weight"].float().numpy() + 7) * np.float32(0.25)
    check_exact(codes_of(METHOD, fields, parts), expected, form=(8, 32, True, False, False, False))


def test_zeros_of_symmetric_weights_are_not_used() -> None:
    written = write_integers(np.random.default_rng(3), (8, 64), 4, 32)
    parts = {**written.parts, "weight_zero_point": torch.zeros(1, 2, dtype=torch.int32)}
    check_exact(
        codes_of(METHOD, integer_fields(4, 32), parts), written.values, form=(4, 32, False, False, False, False)
    )


def test_groups_that_were_never_set_are_of_neighbours() -> None:
    written = write_integers(np.random.default_rng(3), (8, 64), 4, 32)
    parts = {**written.parts, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}
    check_exact(
        codes_of(METHOD, integer_fields(4, 32), parts), written.values, form=(4, 32, False, False, False, False)
    )


def test_scales_in_float32_are_packed_where_halves_have_them() -> None:
    written = write_integers(np.random.default_rng(3), (8, 64), 4, 32)
    exact = {**written.parts, "weight_scale": written.parts["weight_scale"].float()}
    codes = codes_of(METHOD, integer_fields(4, 32), exact)
    check_exact(codes, written.values, form=(4, 32, False, False, False, False))
    other = written.parts["weight_scale"].float()
    other[7, 1] = 1 / 3  # one of the last output's decides for all, because rows are packed in pieces
    assert codes_of(METHOD, integer_fields(4, 32), {**exact, "weight_scale": other}).grouped(0, 1) is None


@given(
    seed=SEEDS,
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 20),
    block=st.tuples(st.integers(1, 12), st.integers(1, 24)),
    dtype=st.sampled_from([*HALVES, torch.float32]),
)
def test_floats_of_8_bits_are_multiplied_by_the_scales_of_blocks(
    seed: int, outputs: int, inputs: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    random = np.random.default_rng(seed)
    weight = float8(random, outputs, inputs)
    scales = float_scales(random, (-(-outputs // block[0]), -(-inputs // block[1])), dtype)
    weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": list(block)}
    codes = codes_of(METHOD, fields_of(weights, "float-quantized"), {"weight": weight, "weight_scale": scales})
    check_exact(codes, by_block(weight, numbers(scales), block), form=None)


@given(
    seed=SEEDS,
    outputs=st.integers(1, 9),
    groups=st.integers(1, 3),
    strategy=st.sampled_from(["group", "channel", "tensor"]),
)
def test_floats_of_8_bits_have_scales_of_groups_of_outputs_or_one(
    seed: int, outputs: int, groups: int, strategy: str
) -> None:
    random = np.random.default_rng(seed)
    weight = float8(random, outputs, groups * 32)
    shape = {"group": (outputs, groups), "channel": (outputs, 1), "tensor": (1,)}[strategy]
    scales = float_scales(random, shape, torch.uint8 if strategy == "group" else torch.bfloat16)
    size = 32 if strategy == "group" else None
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "group_size": size}
    codes = codes_of(METHOD, fields_of(weights, "mxfp8-quantized"), {"weight": weight, "weight_scale": scales})
    full = np.broadcast_to(numbers(scales).reshape(shape if len(shape) == 2 else (1, 1)), (outputs, groups))
    check_exact(codes, by_block(weight, full, (1, 32)), form=None)


@given(seed=SEEDS, outputs=st.integers(1, 9), groups=st.integers(1, 6))
def test_nvfp4_divides_its_scales_by_that_of_all(seed: int, outputs: int, groups: int) -> None:
    random = np.random.default_rng(seed)
    packed, scales, products = write_float4(random, (outputs, 16 * groups), 16)
    of_all = torch.tensor([float(np.exp2(random.uniform(-4, 12)))])
    parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": of_all}
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    codes = codes_of(METHOD, fields_of(weights, "nvfp4-pack-quantized"), parts)
    found = codes.values(0, outputs)
    np.testing.assert_allclose(found, products / of_all.numpy(), rtol=3e-7)
    check_exact(codes, found, form=None if groups % 2 else (4, 16, False, True, True, False))
    grouped = codes.grouped(0, outputs)
    if grouped is not None and grouped.output_scales is not None:
        halves = grouped.scales / grouped.output_scales[:, None]
        np.testing.assert_allclose(halves, scales.float().numpy() / 2, rtol=3e-7)


@given(seed=SEEDS, outputs=st.integers(1, 9), groups=st.integers(1, 4))
def test_mxfp4_has_powers_of_two_by_32_inputs(seed: int, outputs: int, groups: int) -> None:
    packed, scales, products = write_float4(np.random.default_rng(seed), (outputs, 32 * groups), 32)
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    codes = codes_of(
        METHOD, fields_of(weights, "mxfp4-pack-quantized"), {"weight_packed": packed, "weight_scale": scales}
    )
    check_exact(codes, products, form=(4, 32, False, True, False, False))


def test_mxfp4_scales_reach_the_smallest_power_and_are_dense_beyond_the_largest_float() -> None:
    packed = torch.tensor([[0x71] * 16] * 2, dtype=torch.uint8)  # 0.5 and 6
    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    for exponent, packs in ((0, True), (252, True), (253, False), (254, False)):
        scales = torch.full((2, 1), exponent, dtype=torch.uint8)
        codes = codes_of(
            METHOD, fields_of(weights, "mxfp4-pack-quantized"), {"weight_packed": packed, "weight_scale": scales}
        )
        assert (codes.grouped(0, 2) is not None) == packs
        assert codes.values(0, 2)[0, 0] == np.ldexp(1.0, exponent - 128)
        assert np.isfinite(codes.values(0, 2)[0, 1]) == packs


def test_modules_without_scales_stay_as_they_are() -> None:
    written = write_integers(np.random.default_rng(3), (8, 64), 4, 32)
    stored = stored_parts(written.parts) | stored_parts({"weight": torch.ones(4, 4)}, "lm_head")
    stored |= stored_parts({"weight": torch.ones(4)}, "model.norm") | stored_parts({"bias": torch.ones(4)})
    found = matrices_of(METHOD, integer_fields(4, 32) | {"ignore": ["lm_head"]}, stored)
    assert list(found.coded) == [f"{MODULE}.weight"]
    assert found.parts == {f"{MODULE}.{suffix}" for suffix in written.parts}


def test_scales_of_activations_and_of_the_cache_are_parts_of_no_use() -> None:
    written = write_integers(np.random.default_rng(3), (8, 64), 8, None, packed=False)
    scales = {name: torch.ones(1) for name in ("input_scale", "input_zero_point", "input_global_scale", "output_scale")}
    stored = stored_parts({**written.parts, **scales})
    stored |= stored_parts(
        {"k_scale": torch.ones(1), "v_scale": torch.ones(1), "q_scale": torch.ones(1)}, "model.layers.0.self_attn"
    )
    assert matrices_of(METHOD, integer_fields(8, None), stored).parts == set(stored)
