"""Writes matrices as compressed-tensors, transformers and ModelOpt store them, from the documented layouts.

They share no code with the readers: numbers are drawn at random, packed one by one, and multiplied in float64.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.engine.native.formats.quantized.parts_in_memory import Floats, Written

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
Integers = npt.NDArray[np.int64]


def integer_fields(
    bits: int, group: int | None, *, symmetric: bool = True, form: str = "pack-quantized"
) -> dict[str, Any]:
    """Return the declaration of a model whose linear modules are of integers."""
    strategy = "group" if group else "channel"
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group}
    return fields_of(weights, form)


def fields_of(weights: dict[str, Any], form: str, **others: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"config_groups": {"group_0": group}, "format": form, "quantization_status": "compressed", **others}


def words_of(rows: Integers, bits: int) -> torch.Tensor:
    """Return rows of signed numbers as words of 32 bits, from the lowest bits on."""
    each = 32 // bits
    words = np.zeros((len(rows), -(-rows.shape[1] // each)), np.uint32)
    for (row, column), number in np.ndenumerate(rows):
        words[row, column // each] |= np.uint32((int(number) + 2 ** (bits - 1)) << (column % each * bits))
    return torch.from_numpy(words.view(np.int32))


def write_integers(
    random: np.random.Generator,
    shape: tuple[int, int],
    bits: int,
    group: int | None,
    *,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    order: bool = False,
    packed: bool = True,
) -> Written:
    """Write integers with scales and zeros by group of inputs, in neighbours' groups or in random ones."""
    outputs, inputs = shape
    groups = inputs // (group or inputs)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = random.integers(low, high, shape)
    zeros = np.zeros((outputs, groups), np.int64) if symmetric else random.integers(low, high, (outputs, groups))
    zeros[0, 0] = 0 if symmetric else low  # zeros that are all 0 are none
    scales = torch.from_numpy(random.normal(scale=0.05, size=(outputs, groups))).to(dtype)
    of_inputs = np.arange(inputs) // (group or inputs)
    if order:
        of_inputs = random.permutation(of_inputs)
        place = int(np.argmax(of_inputs))
        of_inputs[[0, place]] = of_inputs[[place, 0]]  # the last group comes first
    values = (codes - zeros[:, of_inputs]) * scales.double().numpy()[:, of_inputs]
    parts = {"weight_scale": scales}
    if packed:
        parts |= {"weight_packed": words_of(codes, bits), "weight_shape": torch.tensor(shape)}
    else:
        parts["weight"] = torch.from_numpy(codes.astype(np.int8))
    if not symmetric:
        plain = torch.from_numpy(zeros.astype(np.int8))
        parts["weight_zero_point"] = words_of(zeros.T, bits).T.contiguous() if packed else plain
    if order:
        parts["weight_g_idx"] = torch.from_numpy(of_inputs.astype(np.int32))
    return Written(parts, values.astype(np.float32))


def float8(random: np.random.Generator, *shape: int) -> torch.Tensor:
    """Return e4m3fn of all codes but NaN."""
    codes = random.choice([code for code in range(256) if code & 127 != 127], shape).astype(np.uint8)
    return torch.from_numpy(codes).view(torch.float8_e4m3fn)


def by_block(weight: torch.Tensor, scales: npt.NDArray[np.float64], block: tuple[int, int]) -> Floats:
    """Return the products with scales of blocks, of which the last may be smaller."""
    found = weight.double().numpy().copy()
    for (row, column), scale in np.ndenumerate(scales):
        found[row * block[0] : (row + 1) * block[0], column * block[1] : (column + 1) * block[1]] *= scale
    return found.astype(np.float32)


def float_scales(random: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return positive scales; of bytes, exponents of two."""
    if dtype in (torch.uint8, torch.float8_e8m0fnu):
        return torch.from_numpy(random.integers(100, 150, shape).astype(np.uint8)).view(dtype)
    return torch.from_numpy(np.asarray(np.exp2(random.uniform(-9, 3, shape)))).to(dtype)


def numbers(scales: torch.Tensor) -> npt.NDArray[np.float64]:
    """Return what scales are in float64."""
    found: npt.NDArray[np.float64] = scales.double().numpy()
    return np.exp2(found - 127) if scales.dtype == torch.uint8 else found


def write_float4(
    random: np.random.Generator, shape: tuple[int, int], group: int
) -> tuple[torch.Tensor, torch.Tensor, Floats]:
    """Return packed codes, scales (e4m3 by 16, exponents by 32), and the products."""
    outputs, inputs = shape
    codes = random.integers(0, 16, shape)
    packed = torch.from_numpy((codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8))
    size = (outputs, inputs // group)
    scales = float8(random, *size) if group == 16 else float_scales(random, size, torch.uint8)
    table = np.array(E2M1)
    values = np.empty(shape)
    for (row, column), code in np.ndenumerate(codes):
        values[row, column] = table[code] * numbers(scales)[row, column // group]
    return packed, scales, values.astype(np.float32)
