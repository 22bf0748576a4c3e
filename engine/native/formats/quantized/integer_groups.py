"""Matrices of integers with scales and zeros by group of inputs. It imports no torch: a start is refused early."""

from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.native.formats.grouped import GroupedWeights

GROUP = 32  # inputs that have one scale in the kernels
_PACKED_BITS = 4  # in which kernels have 2 and 3 bits too

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


class IntegerParts(Protocol):
    """The stored parts of a matrix [outputs, inputs], whose values are scale * (code - zero). Each call reads a file.

    Codes and zeros are below 2**bits.
    """

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    @property
    def bits(self) -> int:
        """2, 3, 4 or 8."""

    @property
    def half_scales(self) -> bool:
        """Whether the file has scales in float16 or bfloat16."""

    def group_of_inputs(self) -> Places:
        """Return the group of each input, [inputs]. Raises ModelUnsupported, with the tensor's name, if there is none.

        Inputs of a group need not follow each other.
        """

    def codes(self, begin: int, end: int) -> Bytes:
        """Return the codes of the outputs from `begin` to before `end`, [end - begin, inputs]."""

    def zeros(self, begin: int, end: int) -> Bytes:
        """Return the zeros of the same outputs, [end - begin, groups]."""

    def scales(self, begin: int, end: int) -> Floats:
        """Return the scales of the same outputs, [end - begin, groups]."""


class IntegerCodes:
    """A matrix of integers in the form of its file (`StoredCodes`).

    Its packed form is exact: groups become groups of 32 inputs with equal scales, inputs are sorted by group, 2 and 3
    bits are 4. There is none if a group has other than whole 32 inputs, or if scales are exact in neither float16 nor
    bfloat16; but one group of all inputs, with zeros in the middle, keeps its scales in float32.
    """

    def __init__(self, parts: IntegerParts) -> None:
        self._parts = parts

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._parts.shape

    def grouped(self, begin: int, end: int) -> GroupedWeights | None:
        """Return the outputs from `begin` to before `end` exactly; None if the matrix has no such form."""
        tiles = self._tiles
        if tiles is None:
            return None
        codes, zeros, scales = self._read(begin, end)
        if self._parts.bits < _PACKED_BITS:
            codes = codes + (np.uint8(8) - zeros)[:, self._groups]
        if tiles.order is not None:
            codes = codes[:, tiles.order]
        bits = max(self._parts.bits, _PACKED_BITS)
        if not self._centred:
            zeros = zeros[:, tiles.groups]
        elif scales.shape[1] == 1:
            return GroupedWeights(codes, scales, None, 1 << (bits - 1), bits, codes.shape[1])
        return GroupedWeights(
            codes,
            scales[:, tiles.groups],
            None,
            1 << (bits - 1),
            bits,
            GROUP,
            zeros=None if self._centred else zeros,
            order=tiles.order,
        )

    def values(self, begin: int, end: int) -> Floats:
        """Return the values of the same outputs, float32 [end - begin, inputs]."""
        codes, zeros, scales = self._read(begin, end)
        values = codes.astype(np.float32)
        values -= zeros[:, self._groups]
        values *= scales[:, self._groups]
        return values

    def _read(self, begin: int, end: int) -> tuple[Bytes, Bytes, Floats]:
        parts = self._parts
        return parts.codes(begin, end), parts.zeros(begin, end), parts.scales(begin, end)

    @cached_property
    def _groups(self) -> Places:
        return self._parts.group_of_inputs()

    @cached_property
    def _centred(self) -> bool:
        """Whether all zeros are in the middle of the codes, once 2 and 3 bits are 4."""
        bits = self._parts.bits
        return bits < _PACKED_BITS or bool((self._parts.zeros(0, self.shape[0]) == 1 << (bits - 1)).all())

    @cached_property
    def _tiles(self) -> "_Tiles | None":
        tiles = _tiles(self._groups)
        if tiles is None or self._parts.half_scales or (self._centred and not tiles.groups.any()):
            return tiles
        return tiles if _are_half(self._parts.scales(0, self.shape[0])) else None


class _Tiles(NamedTuple):
    """Inputs in tiles of 32 of one group: their order, None for their own, and the group of each tile."""

    order: Places | None
    groups: Places


def _tiles(groups: Places) -> _Tiles | None:
    """Return the tiles of inputs with these groups, sorted stably by group; None if a tile would have several."""
    if len(groups) % GROUP:
        return None
    order = None if (np.diff(groups) >= 0).all() else np.argsort(groups, kind="stable")
    tiles = (groups if order is None else groups[order]).reshape(-1, GROUP)
    return _Tiles(order, tiles[:, 0]) if (tiles == tiles[:, :1]).all() else None


def _are_half(scales: Floats) -> bool:
    """Return whether all scales are exact in float16, or all in bfloat16."""
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16).astype(np.float32)
    return np.array_equal(halves, scales) or not (scales.view(np.uint32) & 0xFFFF).any()
