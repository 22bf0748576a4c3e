"""Quantized weights in one form, whatever file they come from."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)
"""Twice the numbers of FP4 (1 sign bit, 2 bits of exponent, 1 of mantissa), of MXFP4 and NVFP4."""
IQ4_NL = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)
"""The numbers of ggml's IQ4_NL and IQ4_XS, its kvalues_iq4nl."""


class TwoLevel(NamedTuple):
    """Scales that are themselves quantized, as in Q2_K to Q6_K and IQ4_XS: by super group of 256 inputs.

    A group's scale is `super_scales` of its super group times its `scale_codes`, uint8 or int8 [outputs, inputs //
    group]; its minimum is -`super_minimums` times `minimum_codes`, if there are any. The super scales and super
    minimums are float32 [outputs, inputs // 256], exact in float16.
    """

    scale_codes: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    super_scales: npt.NDArray[np.float32]
    minimum_codes: npt.NDArray[np.uint8] | None
    super_minimums: npt.NDArray[np.float32] | None

    def of_rows(self, outputs: int) -> "TwoLevel":
        """Return the values of blocks, in order of the rows, as [outputs, ...]."""
        minimum_codes, super_minimums = self.minimum_codes, self.super_minimums
        return TwoLevel(
            self.scale_codes.reshape(outputs, -1),
            self.super_scales.reshape(outputs, -1),
            None if minimum_codes is None else minimum_codes.reshape(outputs, -1),
            None if super_minimums is None else super_minimums.reshape(outputs, -1),
        )


class GroupedWeights(NamedTuple):
    """One matrix [outputs, inputs]: scale * (code - zero), or scale * code + minimum, by group of inputs.

    `codes` is uint8 [outputs, inputs], unsigned, below 2**bits. `scales` is float32 [outputs, inputs // group], and so
    is `minimums`, the value of code 0 in each group; without minimums, `zero` is the code of the value 0, which is
    2**(bits - 1). `bits` is 4, 5, 6 or 8. `group` is 32 inputs, 16 for some formats, and all inputs where a scale is
    for each output. Scales and minimums of groups are exact in float16 or in bfloat16, or products of `levels` or of
    `output_scales`.

    Optional: `zeros`, uint8 [outputs, inputs // group], are zeros by group instead of `zero`. `table`, int8 [16]: a
    weight is scale * table[code]. `output_scales`, float32 [outputs]: each of `scales` is a float16 number times that
    of its output. `order`, int64 [inputs]: column k of `codes` multiplies input order[k]; groups are of columns.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    minimums: npt.NDArray[np.float32] | None
    zero: int
    bits: int
    group: int
    levels: TwoLevel | None = None
    zeros: npt.NDArray[np.uint8] | None = None
    table: npt.NDArray[np.int8] | None = None
    output_scales: npt.NDArray[np.float32] | None = None
    order: npt.NDArray[np.int64] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def dense(self) -> npt.NDArray[np.float32]:
        """The values, float32 [outputs, inputs], of inputs in their own order."""
        outputs, inputs = self.shape
        values = self._numbers().reshape(outputs, inputs // self.group, self.group)
        if self.zeros is not None:
            values -= self.zeros[:, :, None]
        values *= self.scales[:, :, None]
        if self.minimums is not None:
            values += self.minimums[:, :, None]
        dense = values.reshape(outputs, inputs)
        if self.order is None:
            return dense
        ordered = np.empty_like(dense)
        ordered[:, self.order] = dense
        return ordered

    def _numbers(self) -> npt.NDArray[np.float32]:
        """What the scales multiply, less zeros by group."""
        if self.table is not None:
            return self.table.astype(np.float32)[self.codes]
        numbers = self.codes.astype(np.float32)
        if self.minimums is None and self.zeros is None:
            numbers -= np.float32(self.zero)
        return numbers


def half_powers(exponents: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """Return 2**(e - 128) of e8m0 exponents, the scales of doubled e2m1 values: uint8 to float32 of the same shape.

    The first two are subnormal. 255, which is no number in the specification of OCP, gives 2**127, as in ggml.
    """
    wide = exponents.astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(1 << 21) << (wide & 1), (wide - np.uint32(1)) << np.uint32(23))
    return bits.view(np.float32)
