"""Matrices of integers of 8 and of 4 bits with scales, as compressed-tensors stores them. It imports no torch.

A weight is (q - z) * s with signed q and z: as int8, or with 2**(bits - 1) added in words of 32 bits, first inputs in
the low bits; zeros are packed along the outputs. With `weight_g_idx` the group of input i is its element i
(compressed-tensors 0.14: `compressors/quantized_compressors/pack_quantized.py`).
"""

from collections.abc import Mapping
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.grouped import GroupedWeights
from engine.native.formats.quantized.float_codes import FLOATS, Named, nibbles, scales_of
from engine.native.formats.quantized.scheme import check_part, sides
from engine.native.formats.tensors import TypedTensor

PACKED, PLAIN = "weight_packed", "weight"
SCALE, ZERO, ORDER, SHAPE = "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
_WORD = 32  # bits
_TILE = 32  # inputs with a scale in the kernels
_Number = TypeVar("_Number", np.float32, np.uint8)


class IntegerCodes:
    """One matrix. `parts` are its tensors by suffix; `group` inputs have a scale, all of them at most."""

    def __init__(
        self, module: str, parts: Mapping[str, TypedTensor], shape: tuple[int, int], bits: int, group: int
    ) -> None:
        """`bits` are 4 or 8. The parts must fit, see `integer_codes`."""
        self._module, self._parts, self._shape = module, parts, shape
        self._bits, self._group = bits, group

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self._shape

    def grouped(self, begin: int, end: int) -> GroupedWeights | None:
        """Return outputs in groups of 32 inputs, or with one scale each; None if no kernel has such a form.

        Raises ModelUnsupported, with the tensor's name, if values of a part contradict others.
        """
        if not self._has_form:
            return None
        found = self._weights(begin, end)
        return found if self._is_by_output else _in_tiles(found)

    def values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the products, float32. Raises ModelUnsupported, with the tensor's name, as `grouped`."""
        with np.errstate(over="ignore"):  # values that are not finite are refused where they are used
            return self._weights(begin, end).dense()

    @cached_property
    def _has_form(self) -> bool:
        if self._shape[1] % _TILE:
            return False
        return self._is_by_output or (self._group % _TILE == 0 and self._are_halves())

    @property
    def _is_by_output(self) -> bool:
        return self._group == self._shape[1] and ZERO not in self._parts

    def _are_halves(self) -> bool:
        """Return whether all scales are float16, or all bfloat16. Those of all outputs decide for each of them."""
        if self._parts[SCALE].get_dtype() != "F32":
            return True
        scales = scales_of(self._named(SCALE), 0, self._shape[0])
        with np.errstate(over="ignore"):
            in_half = (scales.astype(np.float16) == scales).all()
        return bool(in_half or not (scales.view(np.uint32) & 0xFFFF).any())

    def _weights(self, begin: int, end: int) -> GroupedWeights:
        """Return outputs in groups as the file has them."""
        self._check_declared_shape()
        order = self._order
        codes = self._codes(begin, end) if order is None else self._codes(begin, end)[:, order]
        scales = self._of_outputs(scales_of(self._named(SCALE), begin, end), end - begin)
        zero = 1 << (self._bits - 1)
        return GroupedWeights(
            codes, scales, None, zero, self._bits, self._group, zeros=self._zeros(begin, end), order=order
        )

    def _codes(self, begin: int, end: int) -> npt.NDArray[np.uint8]:
        if PLAIN in self._parts:
            return _unsigned(self._parts[PLAIN][begin:end].numpy())
        return _unpacked(self._parts[PACKED][begin:end].numpy(), self._bits)[:, : self._shape[1]]

    def _zeros(self, begin: int, end: int) -> npt.NDArray[np.uint8] | None:
        if ZERO not in self._parts:
            return None
        tensor = self._parts[ZERO]
        if tensor.get_dtype() == "I8":
            alone = tuple(tensor.get_shape()) == (1,)
            stored = (tensor[...] if alone else tensor[begin:end]).numpy()
            return self._of_outputs(_unsigned(stored.reshape(len(stored), -1)), end - begin)
        first = begin * self._bits // _WORD
        words = tensor[first : -(-end * self._bits // _WORD)].numpy()
        begin, end = (place - first * _WORD // self._bits for place in (begin, end))
        return np.ascontiguousarray(_unpacked(words.T, self._bits)[:, begin:end].T)

    def _of_outputs(self, values: npt.NDArray[_Number], outputs: int) -> npt.NDArray[_Number]:
        """Return values of groups, which may be one for all, for each output."""
        return np.ascontiguousarray(np.broadcast_to(values, (outputs, self._shape[1] // self._group)))

    @cached_property
    def _order(self) -> npt.NDArray[np.int64] | None:
        """The inputs by group. Groups of all -1 were never set: they are those of neighbours."""
        if ORDER not in self._parts or self._group == self._shape[1]:
            return None
        of_inputs = self._parts[ORDER][...].numpy()
        if (of_inputs == -1).all():
            return None
        order = np.argsort(of_inputs, kind="stable").astype(np.int64)
        if (of_inputs[order] != np.arange(self._shape[1]) // self._group).any():
            raise ModelUnsupported(
                f"its tensor {self._module}.{ORDER} does not have {self._group} inputs in each group"
            )
        return None if (order == np.arange(len(order))).all() else order

    def _check_declared_shape(self) -> None:
        if SHAPE in self._parts and (found := self._parts[SHAPE][...].tolist()) != list(self._shape):
            raise ModelUnsupported(f"its tensor {self._module}.{SHAPE} says {found}, not {list(self._shape)}")

    def _named(self, suffix: str) -> Named:
        return Named(f"{self._module}.{suffix}", self._parts[suffix])


def integer_codes(
    module: str, parts: Mapping[str, TypedTensor], bits: int, group: int | None, *, symmetric: bool
) -> IntegerCodes:
    """Return the matrix of a module, whose parts are by suffix; `group` inputs have a scale, all if None.

    Raises ModelUnsupported, naming the tensor, if one is missing, or has a shape or type that does not fit.
    """
    weight = PACKED if PACKED in parts else PLAIN
    bits = bits if weight == PACKED else 8
    shape = _shape(module, parts, bits, group)
    group = group or shape[1]
    _check_scales(module, parts, shape, shape[1] // group)
    if symmetric:
        parts = {suffix: one for suffix, one in parts.items() if suffix != ZERO}
    else:
        _check_zeros(module, parts, shape[0], bits)
    if ORDER in parts:
        check_part(f"{module}.{ORDER}", parts[ORDER], (shape[1],), ("I32", "I64"))
    if SHAPE in parts:
        check_part(f"{module}.{SHAPE}", parts[SHAPE], (2,), ("I64", "I32"))
    return IntegerCodes(module, parts, shape, bits, group)


def _shape(module: str, parts: Mapping[str, TypedTensor], bits: int, group: int | None) -> tuple[int, int]:
    """Return outputs and inputs. The last word of a row may have room for more inputs than there are in groups."""
    weight = PACKED if PACKED in parts else PLAIN
    name, tensor = f"{module}.{weight}", parts[weight]
    outputs, columns = sides(name, tensor)
    check_part(name, tensor, (outputs, columns), ("I32" if weight == PACKED else "I8",))
    each = _WORD // bits if weight == PACKED else 1
    inputs = columns * each
    if group is None:
        return outputs, inputs
    inputs -= inputs % group if inputs % group < each else 0
    if inputs % group or not inputs:
        raise ModelUnsupported(f"its tensor {name} has {inputs} inputs, no multiple of the group size {group}")
    return outputs, inputs


def _check_scales(module: str, parts: Mapping[str, TypedTensor], shape: tuple[int, int], groups: int) -> None:
    name = f"{module}.{SCALE}"
    if SCALE not in parts:
        raise ModelUnsupported(f"its weights have no tensor {name}")
    found = tuple(parts[SCALE].get_shape())
    of_all = groups == 1 and found in ((), (1,), (1, 1))
    check_part(name, parts[SCALE], found if of_all else (shape[0], groups), FLOATS)


def _check_zeros(module: str, parts: Mapping[str, TypedTensor], outputs: int, bits: int) -> None:
    name = f"{module}.{ZERO}"
    if ZERO not in parts:
        raise ModelUnsupported(f"its weights have no tensor {name}, but its quantization declares symmetric as false")
    scales = tuple(parts[SCALE].get_shape())
    if PACKED in parts and len(scales) == 2:
        check_part(name, parts[ZERO], (-(-outputs * bits // _WORD), scales[1]), ("I32",))
    else:
        check_part(name, parts[ZERO], scales or (1,), ("I8",))


def _unpacked(words: npt.NDArray[np.int32], bits: int) -> npt.NDArray[np.uint8]:
    """Return the codes in rows of words, uint8 [rows, words * 32 / bits]."""
    found = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
    return nibbles(found) if bits == 4 else found


def _unsigned(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    return codes.view(np.uint8) ^ np.uint8(128)


def _in_tiles(weights: GroupedWeights) -> GroupedWeights:
    """Return the same weights in groups of 32 inputs."""
    times = weights.group // _TILE
    if times == 1:
        return weights
    zeros = None if weights.zeros is None else np.repeat(weights.zeros, times, axis=1)
    return weights._replace(scales=np.repeat(weights.scales, times, axis=1), zeros=zeros, group=_TILE)
