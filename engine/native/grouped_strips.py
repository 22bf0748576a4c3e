"""Packed strips of quantized weights: which layout a matrix has in the kernels, and packing it."""

from collections.abc import Sequence
from ctypes import Structure, c_int32, c_void_p
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from engine.native.formats.grouped import GroupedWeights
from engine.native.kernels import Kernels

OUTPUTS = 16  # of a strip
_OUTPUT, _LEVELS, _LEVELS_16, _TILE, _MINIMUMS = "output", "two levels", "two levels of 16", "tile", "minimums"
# Bits and scales of each format, in the order of x86/grouped/format.h.
_FORMATS = (
    (4, _TILE),
    (4, _MINIMUMS),
    (5, _TILE),
    (5, _MINIMUMS),
    (8, _TILE),
    (8, _OUTPUT),
    (4, _LEVELS),
    (5, _LEVELS),
    (6, _LEVELS_16),
)
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
    """Return the number of the kernels' format for these weights. Raises ValueError if there is none."""
    found = (weights.bits, _scales_of(weights))
    zero = 1 << (weights.bits - 1)
    if found not in _FORMATS or (weights.minimums is None and weights.zero != zero):
        raise ValueError(
            f"no kernel multiplies {weights.bits} bits in groups of {weights.group} with zero {weights.zero} "
            f"and scales by {found[1]}"
        )
    return _FORMATS.index(found)


def strips_size(kernels: Kernels, weights: GroupedWeights) -> int:
    """Return the bytes of packed weights, whose outputs are padded to 16 and inputs to 32."""
    outputs, inputs = weights.shape
    return -(-outputs // OUTPUTS) * kernels.strip_bytes(format_of(weights), inputs)


def pack_strips(kernels: Kernels, weights: GroupedWeights, packed: torch.Tensor, threads: int) -> npt.NDArray[np.void]:
    """Pack weights into uint8 memory of `strips_size` bytes aligned to 64; return its strips [outputs / 16]."""
    number = format_of(weights)
    outputs, inputs = weights.shape
    levels = weights.levels if _scales_of(weights) in (_LEVELS, _LEVELS_16) else None
    arrays = [
        _contiguous(weights.codes, np.uint8),
        _contiguous(weights.scales, np.float32),
        _contiguous(weights.minimums, np.float32),
        None if levels is None else np.ascontiguousarray(levels.scale_codes),
        None if levels is None else _contiguous(levels.minimum_codes, np.uint8),
        None if levels is None else _contiguous(levels.super_scales, np.float32),
        None if levels is None else _contiguous(levels.super_minimums, np.float32),
    ]
    source = _Source(*(None if one is None else one.ctypes.data for one in arrays), outputs, inputs)
    kernels.pack_grouped(source, number, packed, threads)
    strips = np.empty(-(-outputs // OUTPUTS), STRIPS)
    strips["data"] = packed.data_ptr() + np.arange(len(strips), dtype=np.uint64) * np.uint64(
        kernels.strip_bytes(number, inputs)
    )
    strips["format"] = number
    return strips


def _scales_of(weights: GroupedWeights) -> str:
    if weights.levels is not None:
        return _LEVELS if weights.group == 32 else _LEVELS_16 if weights.group == 16 else "unknown groups"
    if weights.group == weights.shape[1] and weights.minimums is None and weights.bits == 8:
        return _OUTPUT
    if weights.group != 32:
        return "unknown groups"
    return _TILE if weights.minimums is None else _MINIMUMS


def _contiguous(values: npt.NDArray[Any] | None, dtype: Any) -> npt.NDArray[Any] | None:
    return None if values is None else np.ascontiguousarray(values, dtype)
