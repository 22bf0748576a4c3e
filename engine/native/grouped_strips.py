"""Packed strips of quantized weights: which layout a matrix has in the kernels, its size, and packing it.

It imports no torch.
"""

from collections.abc import Iterator, Sequence
from ctypes import Structure, c_int32, c_void_p
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.native.formats.grouped import E2M1, IQ4_NL, GroupedWeights, TwoLevel

if TYPE_CHECKING:
    import torch

    from engine.native.kernels import Kernels

OUTPUTS = 16  # of a strip
_TILE, _HALF = 32, 16  # inputs of a tile, and of half of one
_STEP_BYTES, _SUPER_TILES = 64, 8
_BY_TILE, _BY_WIDE_TILE, _BY_OUTPUT, _BY_HALF = "float16", "bfloat16", "output", "float16 of 16 and output"
_LEVELS, _LEVELS_16 = "two levels", "two levels of 16"
_MINIMUMS, _ZEROS = "minimums", "zeros"
_TABLES = {"e2m1": E2M1, "iq4_nl": IQ4_NL}


class NoKernel(ValueError):
    """No kernel multiplies these weights as they are; the message says what they have."""


class StripFormat(NamedTuple):
    """A layout of x86/grouped/format.h."""

    bits: int
    scales: str
    offsets: str = ""
    table: str = ""

    def strip_bytes(self, inputs: int) -> int:
        """Return the bytes of 16 outputs: codes, scales by tile, and scales for more tiles, in whole cache lines."""
        tiles = -(-inputs // _TILE)
        levels = self.scales in (_LEVELS, _LEVELS_16)
        numbers = OUTPUTS * (2 if self.offsets == _MINIMUMS else 1)  # of a group
        groups = 0 if self.scales == _BY_OUTPUT else 2 if self.scales in (_BY_HALF, _LEVELS_16) else 1
        by_tile = groups * numbers * (1 if levels else 2) + (OUTPUTS if self.offsets == _ZEROS else 0)
        by_strip = tiles // _SUPER_TILES * numbers * 2 if levels else 0
        if self.scales in (_BY_OUTPUT, _BY_HALF):
            by_strip = OUTPUTS * 4
        return -(-(tiles * (self.bits * _STEP_BYTES + by_tile) + by_strip) // 64) * 64


FORMATS = (
    StripFormat(4, _BY_TILE),
    StripFormat(4, _BY_TILE, _MINIMUMS),
    StripFormat(5, _BY_TILE),
    StripFormat(5, _BY_TILE, _MINIMUMS),
    StripFormat(8, _BY_TILE),
    StripFormat(8, _BY_OUTPUT),
    StripFormat(4, _LEVELS, _MINIMUMS),
    StripFormat(5, _LEVELS, _MINIMUMS),
    StripFormat(6, _LEVELS_16),
    StripFormat(4, _BY_TILE, _ZEROS),
    StripFormat(8, _BY_TILE, _ZEROS),
    StripFormat(4, _BY_OUTPUT),
    StripFormat(4, _BY_WIDE_TILE),
    StripFormat(8, _BY_WIDE_TILE),
    StripFormat(4, _BY_WIDE_TILE, _ZEROS),
    StripFormat(8, _BY_WIDE_TILE, _ZEROS),
    StripFormat(4, _BY_TILE, table="iq4_nl"),
    StripFormat(4, _LEVELS, table="iq4_nl"),
    StripFormat(4, _BY_WIDE_TILE, table="e2m1"),
    StripFormat(4, _BY_HALF, table="e2m1"),
    StripFormat(4, _LEVELS_16, _MINIMUMS),
)
"""In the order of x86/grouped/format.h."""

# Addresses and formats of strips, as the kernels read them.
STRIPS = np.dtype([("data", np.uint64), ("format", np.int64)])


class _Source(Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *(
            (name, c_void_p)
            for name in (
                "codes",
                "scales",
                "minimums",
                "zeros",
                "output_scales",
                "scale_codes",
                "minimum_codes",
                "super_scales",
                "super_minimums",
            )
        ),
        ("outputs", c_int32),
        ("inputs", c_int32),
    ]


def format_of(weights: GroupedWeights) -> int:
    """Return the number of the kernels' format that has exactly these weights. Raises NoKernel if there is none."""
    offsets = " and ".join(_offsets(weights))
    table = _table(weights)
    from_middle = bool(offsets or table) or weights.zero == 1 << (weights.bits - 1)
    for scales in _scales(weights):
        found = StripFormat(weights.bits, scales, offsets, table)
        if found in FORMATS and from_middle and _has_scales(scales, weights):
            return FORMATS.index(found)
    raise NoKernel(f"no kernel multiplies {_described(weights, offsets, table)}")


def packed_bytes(weights: GroupedWeights, outputs: int | None = None) -> int:
    """Return the size in bytes after packing, which pads outputs to 16 and inputs to 32.

    `weights` may be a few rows of a matrix; `outputs` is then the number of all its rows. Raises NoKernel.
    """
    rows, inputs = weights.shape
    return -(-(outputs or rows) // OUTPUTS) * FORMATS[format_of(weights)].strip_bytes(inputs)


def strips_size(kernels: "Kernels", weights: GroupedWeights) -> int:
    """Return the same as `packed_bytes`, by the kernels."""
    outputs, inputs = weights.shape
    return -(-outputs // OUTPUTS) * kernels.strip_bytes(format_of(weights), inputs)


def pack_strips(
    kernels: "Kernels", weights: GroupedWeights, packed: "torch.Tensor", threads: int
) -> npt.NDArray[np.void]:
    """Pack weights into uint8 memory of `strips_size` bytes aligned to 64; return its strips [outputs / 16].

    Columns stay in the order that they have. Raises NoKernel.
    """
    number = format_of(weights)
    outputs, inputs = weights.shape
    arrays = list(_arrays(FORMATS[number], weights))
    source = _Source(*(None if one is None else one.ctypes.data for one in arrays), outputs, inputs)
    kernels.pack_grouped(source, number, packed, threads)
    strips = np.empty(-(-outputs // OUTPUTS), STRIPS)
    strips["data"] = packed.data_ptr() + np.arange(len(strips), dtype=np.uint64) * np.uint64(
        kernels.strip_bytes(number, inputs)
    )
    strips["format"] = number
    return strips


def _arrays(packed: StripFormat, weights: GroupedWeights) -> Iterator[npt.NDArray[Any] | None]:
    """Yield the arrays of GroupedSource in x86/grouped/pack.h."""
    scales = _units(weights) if packed.scales == _BY_HALF else weights.scales
    yield _contiguous(weights.codes, np.uint8)
    yield _contiguous(scales, np.float32)
    yield _contiguous(weights.minimums, np.float32)
    yield _contiguous(weights.zeros, np.uint8)
    yield _contiguous(weights.output_scales, np.float32)
    if weights.levels is None:
        yield from (None,) * 4
        return
    codes = weights.levels.scale_codes
    yield np.ascontiguousarray(codes[:, ::2] if packed.scales == _LEVELS and weights.group == _HALF else codes)
    yield _contiguous(weights.levels.minimum_codes, np.uint8)
    yield _contiguous(weights.levels.super_scales, np.float32)
    yield _contiguous(weights.levels.super_minimums, np.float32)


def _offsets(weights: GroupedWeights) -> Iterator[str]:
    if weights.minimums is not None:
        yield _MINIMUMS
    if weights.zeros is not None:
        yield _ZEROS


def _scales(weights: GroupedWeights) -> tuple[str, ...]:
    """Return the kinds of scales that have these groups, the smallest first."""
    inputs, group = weights.shape[1], weights.group
    if weights.levels is not None:
        return _levels(weights, weights.levels) if inputs % (_TILE * _SUPER_TILES) == 0 else ()
    if weights.output_scales is not None:
        return (_BY_HALF,) if group == _HALF and inputs % _TILE == 0 else ()
    by_tile = (_BY_TILE, _BY_WIDE_TILE) if group == _TILE and inputs % _TILE == 0 else ()
    return (*by_tile, _BY_OUTPUT) if group == inputs else by_tile


def _levels(weights: GroupedWeights, levels: TwoLevel) -> tuple[str, ...]:
    codes = levels.scale_codes
    if codes.dtype != (np.int8 if levels.minimum_codes is None else np.uint8):
        return ()
    # Of tables, groups of 32 may be given as twice as many of 16.
    twice = weights.table is not None and weights.group == _HALF and np.array_equal(codes[:, ::2], codes[:, 1::2])
    if weights.group == _TILE or twice:
        return (_LEVELS,)
    return (_LEVELS_16,) if weights.group == _HALF else ()


def _table(weights: GroupedWeights) -> str:
    if weights.table is None:
        return ""
    return next((name for name, one in _TABLES.items() if np.array_equal(one, weights.table)), "unknown")


def _has_scales(scales: str, weights: GroupedWeights) -> bool:
    """Return whether scales of a kind have all bits of these, and of the minimums."""
    if scales == _BY_OUTPUT:
        return True
    if scales == _BY_WIDE_TILE:
        return weights.minimums is None and not (weights.scales.view(np.uint32) & 0xFFFF).any()
    if weights.levels is not None:
        return _in_float16(weights.levels.super_scales) and _in_float16(weights.levels.super_minimums)
    if weights.output_scales is not None:
        with np.errstate(invalid="ignore"):
            return np.array_equal(_units(weights) * weights.output_scales[:, None], weights.scales)
    return _in_float16(weights.scales) and _in_float16(weights.minimums)


def _in_float16(values: npt.NDArray[np.float32] | None) -> bool:
    with np.errstate(over="ignore"):
        return values is None or bool((values.astype(np.float16) == values).all())


def _units(weights: GroupedWeights) -> npt.NDArray[np.float32]:
    """Return the float16 numbers that the scales of outputs were multiplied by, as float32; zeros without a scale."""
    assert weights.output_scales is not None
    with np.errstate(all="ignore"):
        units = np.where(weights.scales == 0, 0, weights.scales / weights.output_scales[:, None])
        return units.astype(np.float16).astype(np.float32)


def _described(weights: GroupedWeights, offsets: str, table: str) -> str:
    parts = [
        f"{weights.bits} bits in groups of {weights.group}",
        *([f"a table ({table})"] if table else [offsets] if offsets else [f"zero {weights.zero}"]),
        *(["two levels of scales"] if weights.levels is not None else []),
        *(["scales of outputs"] if weights.output_scales is not None else []),
        f"scales from {weights.scales.min(initial=0):g} to {weights.scales.max(initial=0):g}",
    ]
    return ", ".join(parts)


def _contiguous(values: npt.NDArray[Any] | None, dtype: Any) -> npt.NDArray[Any] | None:
    return None if values is None else np.ascontiguousarray(values, dtype)
