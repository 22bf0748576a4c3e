"""Writes matrices as GPTQ's and AWQ's files have them, from the documented layouts; shares no code with the readers.

Weights are rounded to nearest. A row of packed numbers is built as one long integer.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


class Written(NamedTuple):
    """The parts of a matrix by suffix, and its values, float32 [outputs, inputs]."""

    parts: dict[str, torch.Tensor]
    values: Floats


class Rounded(NamedTuple):
    """Codes [outputs, inputs], scales and zeros [outputs, groups], and the group of each input."""

    codes: Integers
    scales: torch.Tensor
    zeros: Integers
    groups: Integers

    def values(self) -> Floats:
        """Return the values, a weight at a time."""
        found = np.empty(self.codes.shape, np.float32)
        scales = self.scales.float().numpy()
        for output, row in enumerate(self.codes):
            for place, code in enumerate(row):
                group = self.groups[place]
                found[output, place] = scales[output, group] * np.float32(int(code) - int(self.zeros[output, group]))
        return found


def rounded(weights: Floats, bits: int, groups: Integers, *, sym: bool, dtype: torch.dtype) -> Rounded:
    """Round weights to nearest in groups of inputs."""
    outputs, inputs = weights.shape
    most, count = 2**bits - 1, int(groups.max()) + 1
    codes, zeros = np.empty((outputs, inputs), np.int64), np.empty((outputs, count), np.int64)
    scales = torch.empty((outputs, count), dtype=dtype)
    for group in range(count):
        part = weights[:, groups == group]
        low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
        span = 2 * np.maximum(-low, high) if sym else high - low
        scales[:, group] = torch.from_numpy(np.maximum(span / most, 1e-3).astype(np.float32)).to(dtype)
        steps = scales[:, group].float().numpy()
        zeros[:, group] = (most + 1) // 2 if sym else np.clip(np.rint(-low / steps), 0, most)
        codes[:, groups == group] = np.clip(np.rint(part / steps[:, None]) + zeros[:, group, None], 0, most)
    return Rounded(codes, scales, zeros, groups)


def packed(rows: Integers, bits: int) -> torch.Tensor:
    """Return rows of numbers as int32 words, from the lowest bits of a word on."""
    words = -(-rows.shape[1] * bits // 32)
    numbers = (sum(int(one) << (bits * place) for place, one in enumerate(row)) for row in rows)
    data = b"".join(number.to_bytes(4 * words, "little") for number in numbers)
    return torch.frombuffer(bytearray(data), dtype=torch.int32).reshape(len(rows), words)


def less_one(zeros: Integers, bits: int) -> torch.Tensor:
    """Return rows of zeros as version 1 has them: 1 is subtracted from all numbers of a word, which may borrow."""
    if bits == 3:
        return packed((zeros - 1) % 8, bits)
    ones = sum(1 << place for place in range(0, 32, bits))
    words = packed(zeros, bits).numpy().astype(np.int64)
    return torch.from_numpy(((words - ones) % 2**32).astype(np.uint32).view(np.int32))


def write_gptq(
    weights: Floats,
    bits: int = 4,
    group: int = 32,
    *,
    version: int = 1,
    sym: bool = True,
    order: Integers | None = None,
    dtype: torch.dtype = torch.float16,
) -> Written:
    """Write a matrix in GPTQ; with `order`, groups are of inputs in this order (desc_act)."""
    inputs = weights.shape[1]
    size = inputs if group == -1 else group
    groups = np.arange(inputs) // size
    if order is not None:
        groups = np.empty(inputs, np.int64)
        for place, one in enumerate(order):
            groups[one] = place // size
    found = rounded(weights, bits, groups, sym=sym, dtype=dtype)
    zeros = found.zeros.T
    parts = {
        "qweight": packed(found.codes, bits).T.contiguous(),
        "qzeros": less_one(zeros, bits) if version == 1 else packed(zeros, bits),
        "scales": found.scales.T.contiguous(),
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }
    return Written(parts, found.values())


def write_awq(weights: Floats, group: int = 64, *, sym: bool = False, dtype: torch.dtype = torch.float16) -> Written:
    """Write a matrix in AWQ's version gemm."""
    inputs = weights.shape[1]
    groups = np.arange(inputs) // (inputs if group == -1 else group)
    found = rounded(weights, 4, groups, sym=sym, dtype=dtype)
    parts = {
        "qweight": packed(_interleaved(found.codes.T), 4),
        "qzeros": packed(_interleaved(found.zeros.T), 4),
        "scales": found.scales.T.contiguous(),
    }
    return Written(parts, found.values())


def _interleaved(rows: Integers) -> Integers:
    """Return rows with the outputs of each eight in the order of AWQ's words."""
    order = [8 * word + one for word in range(rows.shape[1] // 8) for one in (0, 2, 4, 6, 1, 3, 5, 7)]
    return rows[:, order]
