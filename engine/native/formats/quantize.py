"""Quantizes weights while they are loaded: 8 bits with a scale for each output, or 4 bits in groups of 32 inputs.

Both round to nearest, without calibration data. 8 bits are symmetric: scale = max |w| / 127, as in LLM.int8 (Dettmers
et al. 2022) without outliers. 4 bits have a scale and a minimum for each group, as Q4_1 of ggml: minimum = min w,
scale = (max w - min w) / 15, both rounded to float16 before the codes are chosen.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.grouped import GroupedWeights

GROUP = 32
Quantize = Callable[[str, npt.NDArray[np.float32]], GroupedWeights]


def int8(name: str, weights: npt.NDArray[np.float32]) -> GroupedWeights:
    """Quantize float32 [outputs, inputs] to 8 bits.

    Raises ModelUnsupported, with the name, if the inputs are no multiple of 32, or a weight is not finite.
    """
    _check_inputs(name, weights.shape[1])
    scales = np.abs(weights).max(axis=1, keepdims=True) / np.float32(127)
    _check_finite(name, scales)
    codes = np.rint(weights / np.where(scales > 0, scales, 1)) + 128
    return GroupedWeights(codes.astype(np.uint8), scales, None, 128, 8, weights.shape[1])


def int4(name: str, weights: npt.NDArray[np.float32]) -> GroupedWeights:
    """Quantize float32 [outputs, inputs] to 4 bits.

    Raises ModelUnsupported, with the name, if the inputs are not whole groups, or a weight is not within float16.
    """
    outputs, inputs = weights.shape
    _check_inputs(name, inputs)
    groups = weights.reshape(outputs, inputs // GROUP, GROUP)
    low, high = groups.min(axis=2), groups.max(axis=2)
    with np.errstate(over="ignore"):
        minimums = low.astype(np.float16).astype(np.float32)
        scales = ((high - minimums) / 15).astype(np.float16).astype(np.float32)
    _check_finite(name, minimums)
    _check_finite(name, scales)
    codes = np.rint((groups - minimums[:, :, None]) / np.where(scales > 0, scales, 1)[:, :, None]).clip(0, 15)
    return GroupedWeights(codes.astype(np.uint8).reshape(outputs, inputs), scales, minimums, 0, 4, GROUP)


def _check_inputs(name: str, inputs: int) -> None:
    if inputs % GROUP:
        raise ModelUnsupported(f"tensor {name} cannot be quantized: it has {inputs} inputs, no multiple of {GROUP}")


def _check_finite(name: str, values: npt.NDArray[np.float32]) -> None:
    if not np.isfinite(values).all():
        raise ModelUnsupported(f"tensor {name} cannot be quantized: it has weights that are not finite, or too large")
