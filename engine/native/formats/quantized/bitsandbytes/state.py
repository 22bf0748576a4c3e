"""The JSON text that bitsandbytes stores with a matrix of 4 bits. It imports no torch."""

import json
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from engine.errors import ModelUnsupported

_LARGEST_BLOCK = 1 << 16
_LARGEST_OFFSET = 1e38


class Bnb4State(NamedTuple):
    """The shape of a matrix, and how many weights have a scale in common.

    If scales are codes, `nested_block` is how many of them have one, and `offset` is added; otherwise both are 0.
    """

    outputs: int
    inputs: int
    block: int
    nested_block: int
    offset: float


class PartSizes(NamedTuple):
    """The bytes of a matrix's codes, the number of its scales, and that of their scales, 0 if they are no codes."""

    code_bytes: int
    scales: int
    nested_scales: int


def read_state(name: str, text: bytes, kind: str, sizes: PartSizes) -> Bnb4State:
    """Return what a text says of a matrix in nf4 or fp4, the `kind`.

    Raises ModelUnsupported, with the name of its tensor, if it is damaged, or contradicts the sizes of the parts.
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise _Wrong("is no JSON object")
        return _checked(found, kind, sizes)
    except (ValueError, RecursionError) as error:
        raise ModelUnsupported(f"its tensor {name} is no JSON: {str(error)[:80]}") from error
    except _Wrong as error:
        raise ModelUnsupported(f"its tensor {name} {error}") from error


class _Wrong(Exception):
    """What is wrong with a text."""


def _checked(found: Mapping[str, Any], kind: str, sizes: PartSizes) -> Bnb4State:
    if found.get("quant_type") != kind:
        raise _said(found, "quant_type", f"not {kind}")
    shape = found.get("shape")
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(_is_count, shape)):
        raise _said(found, "shape", "not outputs and inputs")
    outputs, inputs = shape
    if -(-prod(shape) // 2) != sizes.code_bytes:
        raise _said(found, "shape", f"but the codes have {sizes.code_bytes} bytes")
    block = _block(found, "blocksize", prod(shape), sizes.scales)
    if not sizes.nested_scales:
        return Bnb4State(outputs, inputs, block, 0, 0.0)
    nested = _block(found, "nested_blocksize", sizes.scales, sizes.nested_scales)
    offset = found.get("nested_offset")
    if not isinstance(offset, int | float) or isinstance(offset, bool) or not abs(offset) < _LARGEST_OFFSET:
        raise _said(found, "nested_offset", "not a number")
    return Bnb4State(outputs, inputs, block, nested, float(offset))


def _block(found: Mapping[str, Any], field: str, numbers: int, scales: int) -> int:
    size = found.get(field)
    if not isinstance(size, int) or not _is_count(size) or size > _LARGEST_BLOCK or -(-numbers // size) != scales:
        raise _said(found, field, f"but there are {scales} scales of {numbers} numbers")
    return size


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _said(found: Mapping[str, Any], field: str, wanted: str) -> _Wrong:
    return _Wrong(f"has {field} {repr(found.get(field))[:80]}, {wanted}")
