"""Matrices of floats of 8 and of 4 bits with scales, in the form of their files. It imports no torch.

Floats of 8 bits are e4m3fn of "FP8 Formats for Deep Learning" (Micikevicius et al. 2022); floats of 4 bits (e2m1) and
scales that are powers of two (e8m0) are of the OCP Microscaling Formats specification 1.0.
"""

from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.grouped import E2M1, GroupedWeights
from engine.native.formats.quantized.scheme import check_matrix, check_part, check_type
from engine.native.formats.tensors import TypedTensor

if TYPE_CHECKING:
    import torch

FLOAT8 = "F8_E4M3"  # safetensors' names of types
FLOATS = ("BF16", "F16", "F32")
POWERS = ("F8_E8M0", "U8")  # exponents of two, and 127
_BIAS = 127
_INPUTS = 32  # to whose multiples the kernels' groups add up


class NamedPart(NamedTuple):
    """A stored tensor with its name, for messages. With `expert`, it is that expert's part of a tensor of all.

    `transposed`: the part is [inputs, outputs].
    """

    name: str
    tensor: TypedTensor
    expert: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, of an expert's part outputs first."""
        shape = tuple(self.tensor.get_shape())
        one = shape if self.expert is None else shape[1:]
        return one[::-1] if self.transposed else one

    def rows(self, begin: int, end: int) -> "torch.Tensor":
        """Read outputs."""
        if self.expert is None:
            return self.tensor[begin:end]
        read: Any = self.tensor  # files read three slices too
        one, outputs = slice(self.expert, self.expert + 1), slice(begin, end)
        found: torch.Tensor = read[one, :, outputs][0].T if self.transposed else read[one, outputs, :][0]
        return found


def scales_of(named: NamedPart, begin: int, end: int) -> npt.NDArray[np.float32]:
    """Read scales of outputs, float32 [end - begin, columns]; of one scale for all, [1, 1].

    Raises ModelUnsupported, with the tensor's name, if one is not finite: 255 of e8m0 is NaN.
    """
    alone = named.expert is None and prod(named.shape) == 1
    found = named.tensor[...] if alone else named.rows(begin, end)
    if named.tensor.get_dtype() == "U8":
        with np.errstate(over="ignore"):
            values = np.ldexp(np.float32(1), found.numpy().astype(np.int32) - _BIAS, dtype=np.float32)
    else:
        values = found.float().numpy()
    if not np.isfinite(values).all():
        raise ModelUnsupported(f"its tensor {named.name} has scales that are not finite")
    return values.reshape(1 if alone else end - begin, -1)


def if_finite(weights: GroupedWeights) -> GroupedWeights | None:
    """Return weights with the table of e2m1; None if their largest value is infinite in float32."""
    with np.errstate(over="ignore"):
        return weights if np.isfinite(weights.scales.max() * np.float32(E2M1.max())) else None


class Float8Codes:
    """A matrix of e4m3fn times a scale for each block of outputs and inputs. Kernels have no such form."""

    def __init__(self, weight: NamedPart, scales: NamedPart, block: tuple[int, int], outputs: range) -> None:
        """The matrix is the rows `outputs` of the tensor `weight`. Blocks are counted from the tensor's first row."""
        self._weight, self._scales, self._block, self._outputs = weight, scales, block, outputs

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self._outputs), self._weight.shape[1]

    def grouped(self, _begin: int, _end: int) -> None:
        """Return None."""

    def values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the products, float32. Raises ModelUnsupported, with the name, if a scale is not finite."""
        rows = self._outputs[begin:end]
        found: npt.NDArray[np.float32] = self._weight.rows(rows.start, rows.stop).float().numpy()
        of_rows = np.arange(rows.start, rows.stop) // self._block[0]
        scales = scales_of(self._scales, of_rows[0], of_rows[-1] + 1)[of_rows - of_rows[0]]
        with np.errstate(over="ignore"):  # values that are not finite are refused where they are used
            found *= scales[:, np.arange(self.shape[1]) // self._block[1]]
        return found


def float8_codes(
    weight: NamedPart, scales: NamedPart, block: tuple[int, int] | None, outputs: range | None = None
) -> Float8Codes:
    """Return the matrix of a tensor, or of its `outputs`; `block` are outputs and inputs with a scale, if declared.

    Otherwise there is one scale, or one for each output. Raises ModelUnsupported, naming the tensor, if the scales do
    not fit, or one has another type.
    """
    check_type(weight.name, weight.tensor, (FLOAT8,))
    check_type(scales.name, scales.tensor, (*FLOATS, *POWERS))
    if weight.expert is None:
        check_matrix(weight.name, weight.tensor, (FLOAT8,))
    shape = weight.shape
    return Float8Codes(weight, scales, _block(scales, shape, block), outputs or range(shape[0]))


def _block(scales: NamedPart, shape: tuple[int, ...], declared: tuple[int, int] | None) -> tuple[int, int]:
    grid = tuple(-(-side // step) for side, step in zip(shape, declared, strict=True)) if declared else (1, 1)
    if declared and scales.shape in (grid, (grid[0], 1, grid[1], 1)):
        return min(declared[0], shape[0]), min(declared[1], shape[1])
    if scales.shape in ((), (1,), (1, 1)):
        return shape[0], shape[1]
    if scales.shape in ((shape[0],), (shape[0], 1)):
        return 1, shape[1]
    expected = list(grid) if declared else [shape[0], 1]
    raise ModelUnsupported(f"its tensor {scales.name} has shape {list(scales.shape)}, not {expected}")


class Float4Codes:
    """A matrix of e2m1 with a scale for each group of inputs, and for NVFP4 one more for all.

    NVFP4 has e4m3 scales by 16 inputs. compressed-tensors divides them by the scale of all, ModelOpt multiplies them.
    MXFP4 has powers of two by 32 inputs.
    """

    def __init__(
        self, codes: NamedPart, scales: NamedPart, group: int, of_all: NamedPart | None, *, divides: bool
    ) -> None:
        """`codes` are uint8 [outputs, inputs / 2], even inputs in the low bits."""
        self._codes, self._scales, self._group = codes, scales, group
        self._of_all, self._divides = of_all, divides

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, columns = self._codes.shape
        return outputs, 2 * columns

    def grouped(self, begin: int, end: int) -> GroupedWeights | None:
        """Return outputs with the table of e2m1; None if no kernel has such inputs, or a value is too large."""
        if self.shape[1] % _INPUTS:
            return None
        return if_finite(self._weights(begin, end))

    def values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the products, float32. Raises ModelUnsupported, with the name, if a scale is not finite."""
        with np.errstate(over="ignore"):
            return self._weights(begin, end).dense()

    def _weights(self, begin: int, end: int) -> GroupedWeights:
        codes = nibbles(self._codes.rows(begin, end).numpy())
        scales = scales_of(self._scales, begin, end) * np.float32(0.5)  # the table has twice the values
        if self._of_all is None:
            return GroupedWeights(codes, scales, None, 0, 4, self._group, table=E2M1)
        of_outputs = np.full(end - begin, self._scale_of_all(self._of_all))
        with np.errstate(over="ignore"):
            scales = scales * of_outputs[:, None]
        return GroupedWeights(codes, scales, None, 0, 4, self._group, table=E2M1, output_scales=of_outputs)

    def _scale_of_all(self, named: NamedPart) -> np.float32:
        found = np.float32(named.tensor[...].float().item())
        with np.errstate(divide="ignore", over="ignore"):
            scale = np.float32(1) / found if self._divides else found
        if not np.isfinite(scale) or not np.isfinite(found):
            raise ModelUnsupported(f"its tensor {named.name} is {found}, which is no scale")
        return scale


def float4_codes(
    codes: NamedPart, scales: NamedPart, of_all: NamedPart | None, *, divides: bool = False
) -> Float4Codes:
    """Return the matrix of a tensor: NVFP4, or without a scale `of_all` MXFP4.

    Raises ModelUnsupported, naming the tensor, if the scales do not fit, or one has another type.
    """
    outputs, columns = check_matrix(codes.name, codes.tensor, ("U8",))
    group = 16 if of_all else 32
    groups = -(-2 * columns // group)
    if 2 * columns % group:
        raise ModelUnsupported(f"its tensor {codes.name} has {2 * columns} inputs, no multiple of {group}")
    check_part(scales.name, scales.tensor, (outputs, groups), (FLOAT8,) if of_all else POWERS)
    if of_all:
        shape = tuple(of_all.tensor.get_shape())
        check_part(of_all.name, of_all.tensor, () if shape == () else (1,), ("F32",))
    return Float4Codes(codes, scales, group, of_all, divides=divides)


def nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the halves of bytes, low bits first: uint8 [rows, 2 * columns]."""
    wide = codes.astype("<u2")
    found: npt.NDArray[np.uint8] = ((wide | wide << 4) & 0x0F0F).view(np.uint8)
    return found
