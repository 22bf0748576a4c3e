"""Integers of 8 and of 4 bits with scales, as compressed-tensors stores them. It imports no torch.

A weight is (q - z) * s with signed q and z: as int8, or with 2**(bits - 1) added in words of 32 bits, first inputs in
the low bits; zeros are packed along the outputs. With `weight_g_idx` the group of input i is its element i
(compressed-tensors 0.14: `compressors/quantized_compressors/pack_quantized.py`).
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.float_codes import FLOATS, NamedPart, nibbles, scales_of
from engine.native.formats.quantized.integer_groups import Bytes, Floats, IntegerCodes, Places
from engine.native.formats.quantized.scheme import check_matrix, check_part
from engine.native.formats.tensors import TypedTensor

PACKED, PLAIN = "weight_packed", "weight"
SCALE, ZERO, ORDER, SHAPE = "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
_WORD = 32  # bits


class CompressedIntegers:
    """One matrix (`IntegerParts`). Its parts are named by suffix, and must fit, see `compressed_integers`."""

    def __init__(self, parts: Mapping[str, NamedPart], shape: tuple[int, int], bits: int, group: int) -> None:
        """`bits` are 4 or 8; `group` inputs have a scale, all of them at most."""
        self._parts, self.shape, self.bits, self._group = parts, shape, bits, group

    @property
    def half_scales(self) -> bool:
        """Whether the file has scales in float16 or bfloat16."""
        return self._parts[SCALE].tensor.get_dtype() != "F32"

    def group_of_inputs(self) -> Places:
        """Return the group of each input, [inputs]. Raises ModelUnsupported, with the tensor's name, if there is none.

        Groups of all -1 were never set: they are those of neighbours. So are they if there is no group.
        """
        self._check_declared_shape()
        neighbours = np.arange(self.shape[1]) // self._group
        if ORDER not in self._parts or self._group == self.shape[1]:
            return neighbours
        found = self._parts[ORDER].tensor[...].numpy().astype(np.int64)
        if (found == -1).all():
            return neighbours
        if (np.sort(found) != neighbours).any():
            raise ModelUnsupported(
                f"its tensor {self._parts[ORDER].name} does not have {self._group} inputs in each group"
            )
        return found

    def codes(self, begin: int, end: int) -> Bytes:
        """Return the codes of outputs, [end - begin, inputs]."""
        if PACKED not in self._parts:
            return _unsigned(self._parts[PLAIN].rows(begin, end).numpy())
        return _unpacked(self._parts[PACKED].rows(begin, end).numpy(), self.bits)[:, : self.shape[1]]

    def zeros(self, begin: int, end: int) -> Bytes:
        """Return the zeros of outputs, [end - begin, groups]; of symmetric codes they are in the middle."""
        if ZERO not in self._parts:
            return np.full((end - begin, self.shape[1] // self._group), 1 << (self.bits - 1), np.uint8)
        zeros = self._parts[ZERO]
        if zeros.tensor.get_dtype() == "I8":
            stored = (zeros.tensor[...] if zeros.shape == (1,) else zeros.rows(begin, end)).numpy()
            return np.broadcast_to(_unsigned(stored.reshape(len(stored), -1)), self._groups_of(end - begin)).copy()
        each = _WORD // self.bits
        first = begin // each
        words = zeros.rows(first, -(-end // each)).numpy()
        return _unpacked(words.T, self.bits)[:, begin - first * each : end - first * each].T.copy()

    def scales(self, begin: int, end: int) -> Floats:
        """Return the scales of outputs, [end - begin, groups]. Raises ModelUnsupported if one is not finite."""
        return np.broadcast_to(scales_of(self._parts[SCALE], begin, end), self._groups_of(end - begin)).copy()

    def _groups_of(self, outputs: int) -> tuple[int, int]:
        return outputs, self.shape[1] // self._group

    def _check_declared_shape(self) -> None:
        if SHAPE in self._parts and (found := self._parts[SHAPE].tensor[...].tolist()) != list(self.shape):
            raise ModelUnsupported(f"its tensor {self._parts[SHAPE].name} says {found}, not {list(self.shape)}")


def compressed_integers(
    module: str, tensors: Mapping[str, TypedTensor], bits: int, group: int | None, *, symmetric: bool
) -> IntegerCodes:
    """Return the matrix of a module, whose tensors are by suffix; `group` inputs have a scale, all if None.

    Raises ModelUnsupported, naming the tensor, if one is missing, or has a shape or type that does not fit.
    """
    parts = {suffix: NamedPart(f"{module}.{suffix}", one) for suffix, one in tensors.items()}
    bits = bits if PACKED in parts else 8
    shape = _shape(parts, bits, group)
    group = group or shape[1]
    _check_scales(module, parts, (shape[0], shape[1] // group), shape[1])
    if symmetric:
        parts.pop(ZERO, None)
    else:
        _check_zeros(module, parts, shape[0], bits)
    for suffix, length in ((ORDER, shape[1]), (SHAPE, 2)):
        if suffix in parts:
            check_part(*parts[suffix][:2], (length,), ("I32", "I64"))
    return IntegerCodes(CompressedIntegers(parts, shape, bits, group))


def _shape(parts: Mapping[str, NamedPart], bits: int, group: int | None) -> tuple[int, int]:
    """Return outputs and inputs. The last word of a row may have room for more inputs than there are in groups."""
    name, tensor = parts[PACKED if PACKED in parts else PLAIN][:2]
    outputs, columns = check_matrix(name, tensor, ("I32" if PACKED in parts else "I8",))
    each = _WORD // bits if PACKED in parts else 1
    inputs = columns * each
    if group is None:
        return outputs, inputs
    inputs -= inputs % group if inputs % group < each else 0
    if inputs % group or not inputs:
        raise ModelUnsupported(f"its tensor {name} has {inputs} inputs, no multiple of group_size {group}")
    return outputs, inputs


def _check_scales(module: str, parts: Mapping[str, NamedPart], shape: tuple[int, int], inputs: int) -> None:
    if SCALE not in parts:
        raise ModelUnsupported(f"its files lack tensor {module}.{SCALE}")
    found = parts[SCALE].shape
    of_all = shape[1] == 1 and found in ((), (1,), (1, 1))
    declared = f"group_size {inputs // shape[1]}" if shape[1] > 1 else "strategy"
    check_part(*parts[SCALE][:2], found if of_all else shape, FLOATS, declared)


def _check_zeros(module: str, parts: Mapping[str, NamedPart], outputs: int, bits: int) -> None:
    if ZERO not in parts:
        raise ModelUnsupported(f"its files lack tensor {module}.{ZERO}, but its quantization is not symmetric")
    scales = parts[SCALE].shape
    if PACKED in parts and len(scales) > 1:
        check_part(*parts[ZERO][:2], (-(-outputs * bits // _WORD), scales[1]), ("I32",))
    else:
        check_part(*parts[ZERO][:2], scales or (1,), ("I8",))


def _unpacked(words: npt.NDArray[np.int32], bits: int) -> Bytes:
    """Return the codes in rows of words, uint8 [rows, words * 32 / bits]."""
    found = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    return nibbles(found) if bits == 4 else found


def _unsigned(codes: npt.NDArray[np.int8]) -> Bytes:
    return codes.view(np.uint8) ^ np.uint8(128)
