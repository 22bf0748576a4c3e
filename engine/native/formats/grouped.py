"""Quantized weights in one form, whatever file they come from."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class GroupedWeights(NamedTuple):
    """One matrix [outputs, inputs]: scale * (code - zero), or scale * code + minimum, by group of inputs.

    `codes` is uint8 [outputs, inputs], unsigned, below 2**bits. `scales` is float32 [outputs, inputs // group], and so
    is `minimums`, the value of code 0 in each group; without minimums, `zero` is the code of the value 0. `bits` is 4,
    5, 6 or 8. `group` is 32 inputs, 16 for Q6_K, and all inputs where a scale is for each output.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    minimums: npt.NDArray[np.float32] | None
    zero: int
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self.codes.shape
        return outputs, inputs

    def dense(self) -> npt.NDArray[np.float32]:
        """The values, float32 [outputs, inputs]."""
        outputs, inputs = self.shape
        values = self.codes.astype(np.float32).reshape(outputs, inputs // self.group, self.group)
        if self.minimums is None:
            values -= np.float32(self.zero)
        values *= self.scales[:, :, None]
        if self.minimums is not None:
            values += self.minimums[:, :, None]
        return values.reshape(outputs, inputs)
