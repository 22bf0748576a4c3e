"""nf4 and fp4 with scales for blocks of weights, as bitsandbytes stores them ("QLoRA", Dettmers et al. 2023). No torch.

`weight` has the codes of all weights, row by row, the first in the high bits of a byte. A weight is a number of a table
times `weight.absmax` of its block. Scales may be codes themselves: a number of `weight.nested_quant_map` times
`weight.nested_absmax`, plus an offset. The shape is in a JSON text, `weight.quant_state.bitsandbytes__nf4`
(bitsandbytes 0.50: `functional.py`).
"""

import re
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.bitsandbytes.state import Bnb4State, PartSizes, read_state
from engine.native.formats.quantized.scheme import Coded, Matrices, check_part, check_type
from engine.native.formats.tensors import TypedTensor

NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
TABLES = {"nf4": NF4, "fp4": FP4}
_APART = 1e-3  # of a file's table: some have four digits
_PART = re.compile(r"(.+)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__(?:nf4|fp4))")
_SCALES, _TABLE = "absmax", "quant_map"
_NESTED_SCALES, _NESTED_TABLE = "nested_absmax", "nested_quant_map"
_STORAGE_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8}  # of types that hold codes
_MOST_STATE_BYTES = 1 << 16


class Bnb4Scheme:
    """A declaration of nf4 or fp4."""

    def __init__(self, kind: str) -> None:
        """`kind` is nf4 or fp4."""
        self._kind = kind
        self.label = f"bitsandbytes {kind}"

    def matrices(self, stored: Mapping[str, TypedTensor]) -> Matrices:
        """Return the quantized matrices of a folder. Raises ModelUnsupported, naming the tensor, as `Scheme`."""
        found: dict[str, dict[str, TypedTensor]] = {}
        for match in filter(None, map(_PART.fullmatch, stored)):
            found.setdefault(match[1], {})[match[2]] = stored[match[0]]
        coded = {weight: Coded(self._codes(weight, parts, stored)) for weight, parts in found.items()}
        names = {*found, *(f"{weight}.{part}" for weight, parts in found.items() for part in parts)}
        return Matrices(coded, frozenset(names))

    def _codes(self, weight: str, parts: Mapping[str, TypedTensor], stored: Mapping[str, TypedTensor]) -> "Bnb4Codes":
        nested = (_NESTED_SCALES, _NESTED_TABLE) if {_NESTED_SCALES, _NESTED_TABLE} & parts.keys() else ()
        needed = (f"quant_state.bitsandbytes__{self._kind}", _SCALES, _TABLE, *nested)
        for name in (weight, *(f"{weight}.{part}" for part in needed)):
            if name not in stored:
                raise ModelUnsupported(f"its files lack tensor {name}, although they have {weight}.{min(parts)}")
        return Bnb4Codes(weight, self._kind, stored[weight], parts)


class Bnb4Codes:
    """A matrix in nf4 or fp4. Kernels have no such form: their tables are of int8."""

    def __init__(self, name: str, kind: str, codes: TypedTensor, parts: Mapping[str, TypedTensor]) -> None:
        """`parts` are the other tensors, by what follows the name of that with the codes.

        Raises ModelUnsupported, naming the tensor, if one has a shape or type that does not fit.
        """
        self._name, self._kind, self._stored, self._parts = name, kind, codes, parts
        self._nested = _NESTED_SCALES in parts
        self._state_name = f"quant_state.bitsandbytes__{kind}"
        check_type(name, codes, _STORAGE_BYTES)
        self._storage = _STORAGE_BYTES[codes.get_dtype()]
        check_part(name, codes, (max(1, prod(codes.get_shape())), 1), _STORAGE_BYTES)
        self._check_vector(_SCALES, "U8" if self._nested else "F32")
        self._check_vector(self._state_name, "U8")
        check_part(f"{name}.{_TABLE}", parts[_TABLE], (len(TABLES[kind]),), ("F32",))
        if self._nested:
            self._check_vector(_NESTED_SCALES, "F32")
            check_part(f"{name}.{_NESTED_TABLE}", parts[_NESTED_TABLE], (256,), ("F32",))
        if (size := self._length(self._state_name)) > _MOST_STATE_BYTES:
            raise ModelUnsupported(f"its tensor {name}.{self._state_name} has {size} bytes, not a short text")

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs. Raises ModelUnsupported, with the name, if the text that has them is damaged."""
        return self._state.outputs, self._state.inputs

    def grouped(self, _begin: int, _end: int) -> None:
        """Return None."""

    def values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the products, float32. Raises ModelUnsupported, with the name, if a part is damaged."""
        state = self._state
        first, last = begin * state.inputs, end * state.inputs  # of all weights
        begin_block = first // state.block
        before = begin_block * state.block
        found = self._numbers(first, last)
        with np.errstate(over="ignore", invalid="ignore"):  # callers refuse what is not finite
            scales = self._scales(begin_block, -(-last // state.block))
            found *= scales.repeat(state.block)[first - before : last - before]
        return found.reshape(end - begin, state.inputs)

    def _numbers(self, first: int, last: int) -> npt.NDArray[np.float32]:
        """Read the codes of weights, and return their numbers in the table."""
        in_element = 2 * self._storage
        begin = first // in_element
        packed = _bytes(self._stored[begin : -(-last // in_element)])
        found = self._pairs.take(packed).view(np.float32)
        return found[first - begin * in_element : last - begin * in_element]

    def _scales(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Read the scales of blocks."""
        stored = self._parts[_SCALES][begin:end].numpy()
        if not self._nested:
            return np.asarray(stored, np.float32)
        of_scales = np.arange(begin, end) // self._state.nested_block
        scales = self._parts[_NESTED_SCALES][int(of_scales[0]) : int(of_scales[-1]) + 1].numpy()
        table = self._parts[_NESTED_TABLE][...].numpy()
        found: npt.NDArray[np.float32] = table[stored] * scales[of_scales - of_scales[0]]
        return found + np.float32(self._state.offset)

    @cached_property
    def _pairs(self) -> npt.NDArray[np.uint64]:
        """The two numbers of each byte. Raises ModelUnsupported, with the name, if the file has another table."""
        known, found = TABLES[self._kind], self._parts[_TABLE][...].numpy()
        if not (np.abs(found - known) < _APART).all():
            raise ModelUnsupported(f"its tensor {self._name}.{_TABLE} has other numbers than those of {self._kind}")
        codes = np.arange(256)
        return np.stack([known[codes >> 4], known[codes & 15]], axis=1).view(np.uint64).reshape(-1)

    @cached_property
    def _state(self) -> Bnb4State:
        text = _bytes(self._parts[self._state_name][...]).tobytes()
        nested = self._length(_NESTED_SCALES) if self._nested else 0
        sizes = PartSizes(prod(self._stored.get_shape()) * self._storage, self._length(_SCALES), nested)
        return read_state(f"{self._name}.{self._state_name}", text, self._kind, sizes)

    def _length(self, part: str) -> int:
        return prod(self._parts[part].get_shape())

    def _check_vector(self, part: str, kind: str) -> None:
        check_part(f"{self._name}.{part}", self._parts[part], (max(1, self._length(part)),), (kind,))


def _bytes(stored: Any) -> npt.NDArray[np.uint8]:
    """Return the bytes of a tensor; also of an array, which headers have instead of small tensors."""
    if isinstance(stored, np.ndarray):
        return stored.view(np.uint8)
    import torch

    found: npt.NDArray[np.uint8] = stored.contiguous().view(-1).view(torch.uint8).numpy()
    return found
