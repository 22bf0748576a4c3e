"""Random quantized weights of every format that the CPU's kernels multiply."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.native.formats.grouped import E2M1, IQ4_NL, GroupedWeights, TwoLevel

Floats = npt.NDArray[np.float32]


class Kind(NamedTuple):
    """What a format has. `group` 0: all inputs. `scales` is the type that holds them."""

    bits: int
    group: int
    scales: str
    offsets: str = ""
    table: npt.NDArray[np.int8] | None = None
    levels: type[np.generic] | None = None


KINDS = {
    "Q4_0": Kind(4, 32, "float16"),
    "Q4_1": Kind(4, 32, "float16", "minimums"),
    "Q5_0": Kind(5, 32, "float16"),
    "Q5_1": Kind(5, 32, "float16", "minimums"),
    "Q8_0": Kind(8, 32, "float16"),
    "int8": Kind(8, 0, "float32"),
    "Q4_K": Kind(4, 32, "", "minimums", levels=np.uint8),
    "Q5_K": Kind(5, 32, "", "minimums", levels=np.uint8),
    "Q6_K": Kind(6, 16, "", levels=np.int8),
    "AWQ": Kind(4, 32, "float16", "zeros"),
    "GPTQ 8": Kind(8, 32, "float16", "zeros"),
    "int4": Kind(4, 0, "float32"),
    "W4A16": Kind(4, 32, "bfloat16"),
    "W8A16": Kind(8, 32, "bfloat16"),
    "W4A16 asymmetric": Kind(4, 32, "bfloat16", "zeros"),
    "W8A16 asymmetric": Kind(8, 32, "bfloat16", "zeros"),
    "IQ4_NL": Kind(4, 32, "float16", table=IQ4_NL),
    "IQ4_XS": Kind(4, 16, "", table=IQ4_NL, levels=np.int8),
    "MXFP4": Kind(4, 32, "bfloat16", table=E2M1),
    "NVFP4": Kind(4, 16, "float16 and float32", table=E2M1),
    "Q2_K": Kind(4, 16, "", "minimums", levels=np.uint8),
}
"""In the order of x86/grouped/format.h."""


def step_of(name: str) -> int:
    """Return what the inputs must be a multiple of."""
    return 256 if KINDS[name].levels else KINDS[name].group or 1


def random_weights(name: str, outputs: int, inputs: int, seed: int = 0) -> GroupedWeights:
    """Return weights with all codes, and scales of different sizes and signs."""
    random, kind = np.random.default_rng((seed, outputs, inputs)), KINDS[name]
    group = kind.group or inputs
    shape = (outputs, inputs // group)
    codes = random.integers(0, 1 << kind.bits, (outputs, inputs), dtype=np.uint8)
    scales, minimums, levels, of_outputs = _scales(random, kind.scales, shape), None, None, None
    if kind.offsets == "minimums":
        minimums = (random.uniform(-9, 9, shape)).astype(np.float16).astype(np.float32)
    if kind.levels:
        levels = _random_levels(random, kind, outputs, inputs)
        scales, minimums = _of_levels(levels, 256 // group)
    if kind.scales == "float16 and float32":
        of_outputs = random.uniform(-0.1, 0.1, outputs).astype(np.float32)
        scales = _scales(random, "float16", shape) * of_outputs[:, None]
    zeros = random.integers(0, 256, shape, dtype=np.uint8)  # files have zeros up to 16 beside 4 bits
    zero = 1 << (kind.bits - 1)
    given = zeros if kind.offsets == "zeros" else None
    return GroupedWeights(codes, scales, minimums, zero, kind.bits, group, levels, given, kind.table, of_outputs)


def _scales(random: np.random.Generator, kind: str, shape: tuple[int, int]) -> Floats:
    scales: Floats = random.uniform(-1, 1, shape).astype(np.float32)
    if kind == "bfloat16":  # of a range that float16 lacks
        scales *= np.float32(2.0) ** random.integers(-30, 5, shape)
        scales[0, 0] = 2.0**-60
        return (scales.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return scales.astype(np.float16).astype(np.float32) if kind == "float16" else scales


def _random_levels(random: np.random.Generator, kind: Kind, outputs: int, inputs: int) -> TwoLevel:
    def units() -> Floats:
        return random.uniform(0, 1, (outputs, inputs // 256)).astype(np.float16).astype(np.float32)

    def codes(least: int, end: int) -> npt.NDArray[Any]:
        return random.integers(least, end, (outputs, inputs // kind.group), dtype=kind.levels)

    if kind.levels == np.uint8:
        return TwoLevel(codes(0, 64), units(), codes(0, 64), units())
    if kind.table is None:
        return TwoLevel(codes(-128, 128), units(), None, None)
    return TwoLevel(np.repeat(codes(-32, 32)[:, ::2], 2, axis=1), units(), None, None)


def _of_levels(levels: TwoLevel, groups: int) -> tuple[Floats, Floats | None]:
    """Return the scales and minimums of groups, so many of a super group."""
    scales = np.repeat(levels.super_scales, groups, axis=1) * levels.scale_codes.astype(np.float32)
    if levels.minimum_codes is None or levels.super_minimums is None:
        return scales, None
    return scales, -np.repeat(levels.super_minimums, groups, axis=1) * levels.minimum_codes.astype(np.float32)


def in_groups_of_32(weights: GroupedWeights) -> GroupedWeights:
    """Return weights of two levels, whose groups of 16 are equal in pairs, with groups of 32."""
    assert weights.levels is not None
    levels = weights.levels._replace(scale_codes=weights.levels.scale_codes[:, ::2])
    return weights._replace(scales=weights.scales[:, ::2], group=32, levels=levels)


def rows_of(weights: GroupedWeights, rows: slice) -> GroupedWeights:
    """Return some rows of a matrix."""
    arrays = {name: _rows(getattr(weights, name), rows) for name in _BY_ROW}
    levels = weights.levels and TwoLevel._make(_rows(one, rows) for one in weights.levels)
    return weights._replace(**arrays, levels=levels)


_BY_ROW = ("codes", "scales", "minimums", "zeros", "output_scales")


def _rows(values: Any, rows: slice) -> Any:
    return None if values is None else values[rows]


def ordered(weights: GroupedWeights, order: npt.NDArray[np.int64]) -> GroupedWeights:
    """Return the same matrix with columns in another order, whose groups have the same columns."""
    return weights._replace(codes=weights.codes[:, order], order=order)


def order_within_groups(inputs: int, seed: int) -> npt.NDArray[np.int64]:
    """Return an order of inputs that keeps each 32 together."""
    random = np.random.default_rng(seed)
    return random.permuted(np.arange(inputs).reshape(-1, 32), axis=1).reshape(-1)
