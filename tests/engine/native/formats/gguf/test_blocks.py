"""Formats of GGUF files, decoded as the package gguf decodes them."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.native.formats.gguf.blocks import FORMATS, BlockFormat
from engine.native.formats.grouped import half_powers

# The upper bytes of scales. That of MXFP4 is an exponent, of which the largest make infinite values.
SCALES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (1, 3)),
    "Q2_K": (81, 83),
    "Q3_K": (109,),
    "Q6_K": (209,),
    "MXFP4": (0,),
}
QUANTIZED = {number: one for number, one in FORMATS.items() if one.decode}


def random_rows(stored: BlockFormat, seed: int, outputs: int = 3, blocks: int = 2) -> np.ndarray:
    """Bytes of any value, but with finite scales: the upper bits of float16's exponent are not all set."""
    rows = np.random.default_rng(seed).integers(0, 256, (outputs, blocks, stored.bytes), dtype=np.uint8)
    rows[..., SCALES.get(stored.name, (1,))] &= 0xBF
    return rows.reshape(outputs, -1)


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: QUANTIZED[number].name)
@given(seed=st.integers(0, 2**32))
def test_any_block_has_the_values_that_gguf_gives_it(number: int, seed: int) -> None:
    stored, kind = QUANTIZED[number], gguf.GGMLQuantizationType(number)
    assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (stored.name, (stored.values, stored.bytes))
    rows = random_rows(stored, seed)
    np.testing.assert_array_equal(stored.grouped(rows).dense(), gguf.quants.dequantize(rows, kind))


def test_exponents_of_mxfp4_are_powers_of_two_down_to_those_below_normal_numbers() -> None:
    scales = half_powers(np.arange(256, dtype=np.uint8))
    assert [float(one) for one in scales] == [2.0 ** (exponent - 128) for exponent in range(256)]


@pytest.mark.parametrize("number", QUANTIZED, ids=lambda number: QUANTIZED[number].name)
def test_codes_are_within_their_bits_and_zero_in_the_middle_without_minimums(number: int) -> None:
    found = QUANTIZED[number].grouped(random_rows(QUANTIZED[number], 0, outputs=64))
    most = {"Q2_K": 3, "Q3_K": 35}  # in more bits than the file's
    assert found.codes.max() == most.get(QUANTIZED[number].name, 2**found.bits - 1)
    assert found.zero == (2 ** (found.bits - 1) if found.minimums is None and found.table is None else 0)
    assert found.scales.shape == (64, found.shape[1] // found.group)


@pytest.mark.parametrize("number", [10, 11, 12, 13, 14, 23], ids=lambda number: QUANTIZED[number].name)
def test_scales_of_two_levels_are_products_of_their_levels(number: int) -> None:
    found = QUANTIZED[number].grouped(random_rows(QUANTIZED[number], 1))
    levels = found.levels
    assert levels is not None
    by_group = 256 // found.group
    np.testing.assert_array_equal(found.scales, levels.super_scales.repeat(by_group, axis=1) * levels.scale_codes)
    if found.minimums is not None:
        products = levels.super_minimums.repeat(by_group, axis=1) * levels.minimum_codes
        np.testing.assert_array_equal(found.minimums, -products)
