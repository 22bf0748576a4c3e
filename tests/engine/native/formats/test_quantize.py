"""Weights quantized while they are loaded."""

import numpy as np
import pytest

from engine.errors import ModelUnsupported
from engine.native.formats import quantize

RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.standard_normal((5, 96), dtype=np.float32) * np.logspace(-3, 1, 5, dtype=np.float32)[:, None]


def test_eight_bits_round_each_weight_to_the_nearest_of_its_output() -> None:
    found = quantize.int8("w", WEIGHTS)
    assert (found.bits, found.group, found.zero, found.minimums) == (8, 96, 128, None)
    error = np.abs(found.dense() - WEIGHTS)
    assert (error <= found.scales * 0.5001).all()
    assert {int(one) for one in np.abs(found.codes.astype(int) - 128).max(axis=1)} == {127}


def test_four_bits_round_each_weight_to_the_nearest_of_its_group() -> None:
    found = quantize.int4("w", WEIGHTS)
    assert (found.bits, found.group) == (4, 32)
    assert found.minimums is not None
    for stored in (found.scales, found.minimums):
        np.testing.assert_array_equal(stored, stored.astype(np.float16).astype(np.float32))
    # The largest weight of a group may be beyond the code 15, because float16 rounds its scale.
    error = np.abs(found.dense() - WEIGHTS).reshape(5, 3, 32)
    assert (error <= found.scales[..., None] * 0.51).all()


def test_equal_weights_and_zeros_stay_what_they_are() -> None:
    rows = np.repeat(np.array([[0.0], [0.5], [-2.0]], dtype=np.float32), 64, axis=1)
    for method in (quantize.int8, quantize.int4):
        np.testing.assert_allclose(method("w", rows).dense(), rows, rtol=1e-6)


@pytest.mark.parametrize("method", [quantize.int8, quantize.int4], ids=["int8", "int4"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_with_their_tensor(method: quantize.Quantize, value: float) -> None:
    weights = WEIGHTS.copy()
    weights[2, 40] = value
    with pytest.raises(ModelUnsupported, match="tensor projection cannot be quantized: it has weights that are not"):
        method("projection", weights)


@pytest.mark.parametrize("method", [quantize.int8, quantize.int4], ids=["int8", "int4"])
def test_inputs_that_are_no_whole_groups_are_refused_with_their_tensor(method: quantize.Quantize) -> None:
    with pytest.raises(ModelUnsupported, match="tensor projection cannot be quantized: it has 80 inputs"):
        method("projection", WEIGHTS[:, :80])
