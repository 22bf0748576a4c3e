"""Parts of quantized matrices in memory, used as the tensors of a file are."""

from collections.abc import Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.native.formats.coded import StoredCodes, joined
from engine.native.formats.quantized import methods
from engine.native.formats.quantized.scheme import Matrices

MODULE = "model.layers.0.self_attn.q_proj"
_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
Floats = npt.NDArray[np.float32]
Form = tuple[int, int, bool, bool, bool, bool]


class InMemory:
    """A tensor in memory as a TypedTensor. It counts the bytes that are read."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.read = 0

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return _TYPES[self._tensor.dtype]

    def __getitem__(self, part: EllipsisType | slice | tuple[slice, ...]) -> torch.Tensor:
        found = self._tensor[part].clone()
        self.read += found.nbytes
        return found


class Written(NamedTuple):
    """The parts of a matrix by suffix, and its values, float32 [outputs, inputs]."""

    parts: dict[str, torch.Tensor]
    values: Floats


def stored_parts(parts: Mapping[str, torch.Tensor], module: str = MODULE) -> dict[str, InMemory]:
    return {f"{module}.{suffix}": InMemory(one) for suffix, one in parts.items()}


def matrices_of(method: str, fields: dict[str, Any], stored: Mapping[str, InMemory]) -> Matrices:
    """Read tensors as a declaration says. Nothing but shapes and types may be read."""
    found = methods.matrices_of(methods.METHODS[method](fields), stored)
    assert not any(one.read for one in stored.values())
    return found


def codes_of(method: str, fields: dict[str, Any], parts: Mapping[str, torch.Tensor]) -> StoredCodes:
    """Return the one matrix whose parts these are."""
    stored = stored_parts(parts)
    found = matrices_of(method, fields, stored)
    assert found.parts == set(stored)
    return found.coded[f"{MODULE}.weight"].codes


def check_exact(codes: StoredCodes, expected: Floats, *, form: Form | None) -> None:
    """Check values and packed form, whole and in pieces of rows, against the values that were written."""
    outputs = len(expected)
    assert codes.shape == expected.shape
    np.testing.assert_array_equal(codes.values(0, outputs), expected, strict=True)
    for begin, end in ((0, 1), (outputs // 2, outputs), (outputs // 3, outputs // 3 + 1)):
        np.testing.assert_array_equal(codes.values(begin, end), expected[begin:end], strict=True)
    assert form_of(codes) == form
    if form is None:
        return
    middle = outputs // 2
    spans = ((0, middle), (middle, outputs)) if middle else ((0, outputs),)
    packed = [one for span in spans if (one := codes.grouped(*span)) is not None]
    np.testing.assert_array_equal(joined(packed).dense(), expected, strict=True)
    assert all(one.codes.max(initial=0) < 1 << one.bits for one in packed)


def form_of(codes: StoredCodes) -> Form | None:
    """Return bits, group (0: a scale for each output), and if it has zeros, a table, scales of outputs and an order."""
    found = codes.grouped(0, codes.shape[0])
    if found is None:
        return None
    by_output = found.table is None and found.zeros is None and found.group == codes.shape[1]
    group = 0 if by_output else found.group
    optional = (found.zeros, found.table, found.output_scales, found.order)
    return found.bits, group, *(one is not None for one in optional)  # type: ignore[return-value]
