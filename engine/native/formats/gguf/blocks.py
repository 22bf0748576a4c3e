"""The tensor formats of GGUF files: blocks of values with common scales, as ggml defines them.

Layouts and arithmetic are those of `ggml-quants.c` and of the package gguf (`gguf.quants`), which tests compare. All
numbers are little endian.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.native.formats.grouped import E2M1, IQ4_NL, GroupedWeights, TwoLevel, half_powers

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class GroupedBlocks(NamedTuple):
    """Blocks in the form of GroupedWeights, one row a block."""

    codes: Bytes
    scales: Floats
    minimums: Floats | None
    levels: TwoLevel | None = None


class BlockFormat(NamedTuple):
    """A format: `values` weights take `bytes`; the rest as in GroupedWeights, where `decode` is given.

    `decode` takes uint8 [blocks, bytes]. Without it `dense` is the type of the values: float32, float16, or uint16 for
    the upper halves of float32 (BF16).
    """

    name: str
    values: int
    bytes: int
    bits: int = 0
    group: int = 0
    zero: int = 0
    decode: Callable[[Bytes], GroupedBlocks] | None = None
    dense: type[np.generic] | None = None
    table: npt.NDArray[np.int8] | None = None

    def grouped(self, rows: Bytes) -> GroupedWeights:
        """Decode uint8 [outputs, bytes of a row]. Only for formats with `decode`."""
        assert self.decode is not None, f"{self.name} has no groups"
        outputs = len(rows)
        found = self.decode(rows.reshape(-1, self.bytes))
        codes, scales = found.codes.reshape(outputs, -1), found.scales.reshape(outputs, -1)
        minimums = None if found.minimums is None else found.minimums.reshape(outputs, -1)
        levels = found.levels and found.levels.of_rows(outputs)
        return GroupedWeights(codes, scales, minimums, self.zero, self.bits, self.group, levels, table=self.table)


_LOW_HALF, _HALF = np.uint8(15), np.uint8(4)
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)[None, :, None]  # of 2 bits in a byte


def _halves(blocks: Bytes, at: int) -> Floats:
    """Return the float16 at a byte of each block, as [blocks, 1]."""
    return blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """Return the lower halves of all bytes of a row, then the upper halves."""
    return np.concatenate([packed & _LOW_HALF, packed >> _HALF], axis=-1)


def _with_fifth_bits(codes: Bytes, blocks: Bytes, at: int) -> Bytes:
    """Add the fifth bits of 32 codes, which stand in 4 bytes."""
    bits = np.unpackbits(blocks[:, at : at + 4], axis=-1, bitorder="little")
    bits <<= 4
    codes |= bits
    return codes


def _q4_0(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_nibbles(blocks[:, 2:]), _halves(blocks, 0), None)


def _q4_1(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2))


def _q5_0(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_with_fifth_bits(_nibbles(blocks[:, 6:]), blocks, 2), _halves(blocks, 0), None)


def _q5_1(blocks: Bytes) -> GroupedBlocks:
    codes = _with_fifth_bits(_nibbles(blocks[:, 8:]), blocks, 4)
    return GroupedBlocks(codes, _halves(blocks, 0), _halves(blocks, 2))


def _q8_0(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(blocks[:, 2:] ^ np.uint8(128), _halves(blocks, 0), None)  # signed plus 128


def _q4_k(blocks: Bytes) -> GroupedBlocks:
    return _by_levels(_nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256), blocks)


def _q5_k(blocks: Bytes) -> GroupedBlocks:
    """As Q4_K, with the fifth bits before: bit i of a byte is of group i."""
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    bits = np.unpackbits(blocks[:, None, 16:48], axis=1, bitorder="little")
    return _by_levels((codes | bits << _HALF).reshape(-1, 256), blocks)


def _by_levels(codes: Bytes, blocks: Bytes) -> GroupedBlocks:
    """8 groups with scales and minimums of 6 bits in 12 bytes, multiples of one scale and one minimum."""
    packed = blocks[:, 4:16]
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale_codes = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=-1)
    minimum_codes = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=-1)
    return _with_minimums(codes, scale_codes, minimum_codes, blocks[:, :4])


def _with_minimums(codes: Bytes, scale_codes: Bytes, minimum_codes: Bytes, super_group: Bytes) -> GroupedBlocks:
    """Return blocks whose last argument has the scale of the scales and that of the minimums."""
    scale, minimum = _halves(super_group, 0), _halves(super_group, 2)
    levels = TwoLevel(scale_codes, scale, minimum_codes, minimum)
    return GroupedBlocks(codes, scale * scale_codes, -(minimum * minimum_codes), levels)


def _q6_k(blocks: Bytes) -> GroupedBlocks:
    """16 groups with scales of 8 bits, multiples of one scale; the upper 2 bits of codes stand apart."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    packed = blocks[:, 128:192].reshape(-1, 2, 32)
    high = np.stack([packed >> np.uint8(shift) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=2)
    scale_codes = blocks[:, 192:208].view(np.int8)
    levels = TwoLevel(scale_codes, _halves(blocks, 208), None, None)
    return GroupedBlocks((low | high << _HALF).reshape(-1, 256), levels.super_scales * scale_codes, None, levels)


def _two_bits(packed: Bytes) -> Bytes:
    """Return 256 codes of 2 bits: of each 32 bytes the lowest, then the next, as [blocks, 256]."""
    rows = packed.reshape(-1, 2, 1, 32)
    return (rows >> _SHIFTS & np.uint8(3)).reshape(-1, 256)


def _q2_k(blocks: Bytes) -> GroupedBlocks:
    """16 groups with scales and minimums of 4 bits, multiples of one scale and one minimum."""
    scale_codes, minimum_codes = blocks[:, :16] & _LOW_HALF, blocks[:, :16] >> _HALF
    return _with_minimums(_two_bits(blocks[:, 16:80]), scale_codes, minimum_codes, blocks[:, 80:84])


def _q3_k(blocks: Bytes) -> GroupedBlocks:
    """16 groups with scales of 6 bits in 12 bytes, less 32; codes of 3 bits, less 4, are raised to 6 bits, less 32."""
    low, high = blocks[:, 96:104].reshape(-1, 8), blocks[:, None, 104:108]
    upper = (high >> _SHIFTS[0] & np.uint8(3)).reshape(-1, 16)
    scale_codes = (_nibbles(low) | upper << _HALF).astype(np.int8) - np.int8(32)
    third = np.unpackbits(blocks[:, None, :32], axis=1, bitorder="little").reshape(-1, 256)
    levels = TwoLevel(scale_codes, _halves(blocks, 108), None, None)
    codes = (_two_bits(blocks[:, 32:96]) | third << np.uint8(2)) + np.uint8(28)
    return GroupedBlocks(codes, levels.super_scales * scale_codes, None, levels)


def _iq4_nl(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_nibbles(blocks[:, 2:]), _halves(blocks, 0), None)


def _iq4_xs(blocks: Bytes) -> GroupedBlocks:
    """8 groups with scales of 6 bits, less 32; each is given as two groups of 16."""
    upper = blocks[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & np.uint16(3)
    lower = np.stack([blocks[:, 4:8] & _LOW_HALF, blocks[:, 4:8] >> _HALF], axis=2).reshape(-1, 8)
    scale_codes = ((lower | upper.astype(np.uint8) << _HALF).astype(np.int8) - np.int8(32)).repeat(2, axis=1)
    levels = TwoLevel(scale_codes, _halves(blocks, 0), None, None)
    codes = _nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256)
    return GroupedBlocks(codes, levels.super_scales * scale_codes, None, levels)


def _mxfp4(blocks: Bytes) -> GroupedBlocks:
    return GroupedBlocks(_nibbles(blocks[:, 1:]), half_powers(blocks[:, :1]), None)


FORMATS = {
    0: BlockFormat("F32", 1, 4, dense=np.float32),
    1: BlockFormat("F16", 1, 2, dense=np.float16),
    30: BlockFormat("BF16", 1, 2, dense=np.uint16),
    8: BlockFormat("Q8_0", 32, 34, 8, 32, 128, _q8_0),
    2: BlockFormat("Q4_0", 32, 18, 4, 32, 8, _q4_0),
    3: BlockFormat("Q4_1", 32, 20, 4, 32, 0, _q4_1),
    6: BlockFormat("Q5_0", 32, 22, 5, 32, 16, _q5_0),
    7: BlockFormat("Q5_1", 32, 24, 5, 32, 0, _q5_1),
    10: BlockFormat("Q2_K", 256, 84, 4, 16, 0, _q2_k),
    11: BlockFormat("Q3_K", 256, 110, 6, 16, 32, _q3_k),
    12: BlockFormat("Q4_K", 256, 144, 4, 32, 0, _q4_k),
    13: BlockFormat("Q5_K", 256, 176, 5, 32, 0, _q5_k),
    14: BlockFormat("Q6_K", 256, 210, 6, 16, 32, _q6_k),
    20: BlockFormat("IQ4_NL", 32, 18, 4, 32, 0, _iq4_nl, table=IQ4_NL),
    23: BlockFormat("IQ4_XS", 256, 136, 4, 16, 0, _iq4_xs, table=IQ4_NL),
    39: BlockFormat("MXFP4", 32, 17, 4, 32, 0, _mxfp4, table=E2M1),
}
"""Formats that are served, by ggml's numbers of types."""
