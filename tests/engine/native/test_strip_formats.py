"""Which layout of strips weights get: one that has all of their bits, or none."""

import subprocess
import sys

import numpy as np
import pytest

from engine.native.formats.grouped import GroupedWeights
from engine.native.grouped_strips import FORMATS, NoKernel, format_of, packed_bytes
from tests.engine.grouped_weights import KINDS, random_weights, step_of


def weights_of(kind: str, outputs: int = 16) -> GroupedWeights:
    return random_weights(kind, outputs, max(64, step_of(kind)))


def test_every_format_has_weights_that_are_packed_so() -> None:
    assert [format_of(weights_of(kind)) for kind in KINDS] == list(range(len(FORMATS)))


@pytest.mark.parametrize("kind", KINDS)
def test_some_rows_have_the_bytes_of_a_whole_matrix(kind: str) -> None:
    """A plan reads one row of a matrix."""
    assert packed_bytes(weights_of(kind, 1), 50) == packed_bytes(weights_of(kind, 50))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "AWQ", "W4A16", "IQ4_NL", "MXFP4", "Q5_0"])
def test_scales_that_need_more_bits_have_no_kernel(kind: str) -> None:
    weights = weights_of(kind)
    scales = weights.scales.copy()
    scales[7, 1] = np.float32(1) / 3
    with pytest.raises(NoKernel, match=f"{weights.bits} bits in groups of 32"):
        format_of(weights._replace(scales=scales))


@pytest.mark.parametrize("value", [1 / 3, float("nan"), 1e9])
def test_minimums_that_need_more_bits_have_no_kernel(value: float) -> None:
    weights = weights_of("Q4_1")
    assert weights.minimums is not None
    minimums = weights.minimums.copy()
    minimums[3, 0] = value
    with pytest.raises(NoKernel, match="minimums"):
        format_of(weights._replace(minimums=minimums))


def test_scales_are_float16_where_that_holds_them_and_else_bfloat16() -> None:
    weights = weights_of("Q8_0")._replace(scales=np.full((16, 2), 2.0**-24, dtype=np.float32))
    assert FORMATS[format_of(weights)].scales == "float16"
    small = weights._replace(scales=np.full((16, 2), 2.0**-25, dtype=np.float32))
    assert FORMATS[format_of(small)].scales == "bfloat16"
    large = weights._replace(scales=np.full((16, 2), 65536, dtype=np.float32))
    assert FORMATS[format_of(large)].scales == "bfloat16"


def test_scales_that_are_no_multiples_of_their_outputs_have_no_kernel() -> None:
    weights = weights_of("NVFP4")
    scales = weights.scales.copy()
    scales[2, 3] *= np.float32(1 + 2**-20)
    with pytest.raises(NoKernel, match="scales of outputs"):
        format_of(weights._replace(scales=scales))
    assert weights.output_scales is not None
    without = weights.output_scales.copy()
    without[2] = 0
    with pytest.raises(NoKernel):
        format_of(weights._replace(output_scales=without))
    scales = weights.scales.copy()
    scales[2] = 0
    format_of(weights._replace(scales=scales, output_scales=without))


@pytest.mark.parametrize("kind", KINDS)
def test_a_combination_that_no_format_has_is_named(kind: str) -> None:
    weights = weights_of(kind)
    table = np.arange(16, dtype=np.int8)
    for other in (weights._replace(table=table), weights._replace(bits=7), weights._replace(group=48)):
        with pytest.raises(NoKernel, match=f"no kernel multiplies {other.bits} bits in groups of {other.group}, "):
            format_of(other)


def test_zeros_and_levels_that_the_kernels_do_not_have_are_named() -> None:
    weights = weights_of("AWQ")
    with pytest.raises(NoKernel, match="zero 3"):
        format_of(weights._replace(zeros=None, zero=3))
    with pytest.raises(NoKernel, match="minimums and zeros"):
        format_of(weights_of("Q4_1")._replace(zeros=weights.zeros))
    levels = weights_of("Q6_K").levels
    assert levels is not None
    unsigned = levels._replace(scale_codes=levels.scale_codes.view(np.uint8))
    with pytest.raises(NoKernel, match="two levels"):
        format_of(weights_of("Q6_K")._replace(levels=unsigned))


@pytest.mark.parametrize("kind", ["Q4_0", "AWQ", "NVFP4", "Q4_K", "Q2_K", "MXFP4"])
def test_inputs_that_are_no_whole_tiles_have_no_kernel(kind: str) -> None:
    weights = weights_of(kind)
    with pytest.raises(NoKernel):
        format_of(weights._replace(codes=weights.codes[:, :-16]))


def test_sizes_are_found_without_torch() -> None:
    """A plan, or a check before a start, needs no kernels."""
    code = "import sys; import engine.native.grouped_strips; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
