"""Writes whole models in published formats. Weights are rounded to nearest.

Layouts are those of the formats' own documentation. Each writer takes float32 [outputs, inputs] and returns the stored
parts by suffix, and the float32 values that they code.
"""

from typing import NamedTuple

import torch

GROUP = 64
_FP8_BLOCK = 128
_FP8_LARGEST = 448.0
_WORD = 8  # codes of 4 bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Magnitudes of e2m1, by code.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E8M0_BIAS, _MX_GROUP = 127, 32


class Stored(NamedTuple):
    """The parts of a matrix by suffix, and its values."""

    parts: dict[str, torch.Tensor]
    values: torch.Tensor


def gptq(weights: torch.Tensor) -> Stored:
    """Store symmetric 4 bits in groups of inputs, version 1."""
    return _gptq(weights, torch.arange(weights.shape[1]))


def gptq_ordered(weights: torch.Tensor) -> Stored:
    """Store the same with groups of inputs by their largest weight, as desc_act orders them by their errors.

    The order is random, which is as hard for a reader: matrices that share their inputs share it.
    """
    generator = torch.Generator().manual_seed(weights.shape[1])
    return _gptq(weights, torch.randperm(weights.shape[1], generator=generator))


def _gptq(weights: torch.Tensor, order: torch.Tensor) -> Stored:
    inputs = weights.shape[1]
    codes, scales = _symmetric(weights[:, order])
    sorted_values = _values(codes - 8, scales)
    values, stored = torch.empty_like(sorted_values), torch.empty_like(codes)
    values[:, order], stored[:, order] = sorted_values, codes
    groups = torch.empty(inputs, dtype=torch.int32)
    groups[order] = (torch.arange(inputs) // GROUP).int()
    zeros = torch.full((inputs // GROUP, len(weights) // _WORD), 0x77777777, dtype=torch.int32)
    parts = {"qweight": _words(stored.T), "qzeros": zeros, "scales": scales.T.contiguous(), "g_idx": groups}
    return Stored(parts, values)


def awq(weights: torch.Tensor) -> Stored:
    """Store asymmetric 4 bits in groups of inputs, version gemm."""
    outputs, inputs = weights.shape
    groups = weights.view(outputs, -1, GROUP)
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = ((groups / scales.float()[:, :, None]).round() + zeros[:, :, None]).clamp(0, 15)
    values = ((codes - zeros[:, :, None]) * scales.float()[:, :, None]).view(outputs, inputs)
    parts = {
        "qweight": _awq_words(codes.view(outputs, inputs).T),
        "qzeros": _awq_words(zeros.T),
        "scales": scales.T.contiguous(),
    }
    return Stored(parts, values)


def w4a16(weights: torch.Tensor) -> Stored:
    """Store symmetric 4 bits in groups, as compressed-tensors packs them."""
    codes, scales = _symmetric(weights)
    values = _values(codes - 8, scales)
    # Words are of inputs here: those of the transposed matrix, transposed.
    words = _words(codes.T).T.contiguous()
    shape = torch.tensor(weights.shape, dtype=torch.int64)
    return Stored({"weight_packed": words, "weight_scale": scales, "weight_shape": shape}, values)


def w8a8(weights: torch.Tensor) -> Stored:
    """Store 8 bits with a scale for each output."""
    scales = (weights.abs().amax(1, keepdim=True) / 127).float()
    codes = (weights / scales).round().clamp(-127, 127)
    return Stored({"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales)


def fp8(weights: torch.Tensor) -> Stored:
    """Store e4m3 with a scale for each block of 128 x 128."""
    outputs, inputs = weights.shape
    rows, columns = (torch.arange(size) // _FP8_BLOCK for size in (outputs, inputs))
    largest = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    spread = (rows[:, None] * largest.shape[1] + columns).flatten()
    largest.view(-1).scatter_reduce_(0, spread, weights.abs().flatten(), "amax")
    scales = (largest / _FP8_LARGEST).clamp(min=1e-12)
    whole = scales[rows][:, columns]
    codes = (weights / whole).to(torch.float8_e4m3fn)
    return Stored({"weight": codes, "weight_scale_inv": scales}, codes.float() * whole)


def mxfp4(weights: torch.Tensor) -> Stored:
    """Store e2m1 with an exponent for 32 inputs, as compressed-tensors packs them."""
    outputs, inputs = weights.shape
    groups = weights.view(outputs, -1, _MX_GROUP)
    largest = groups.abs().amax(2).clamp(min=2.0**-100)
    exponents = torch.floor(torch.log2(largest)) - 2  # that of the largest magnitude, 4 to 6
    scaled = groups / torch.exp2(exponents)[:, :, None]
    codes = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1)
    values = (_E2M1[codes] * scaled.sign() * torch.exp2(exponents)[:, :, None]).view(outputs, inputs)
    nibbles = (codes + 8 * (scaled < 0)).view(outputs, inputs).to(torch.uint8)
    parts = {
        "weight_packed": nibbles[:, ::2] | nibbles[:, 1::2] << 4,
        "weight_scale": (exponents + _E8M0_BIAS).to(torch.uint8),
    }
    return Stored(parts, values)


def _symmetric(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes 0 to 15 around 8 as float32 [outputs, inputs], and float16 scales [outputs, groups]."""
    groups = weights.reshape(len(weights), -1, GROUP)
    scales = (groups.abs().amax(2) / 7).clamp(min=1e-4).half()
    codes = (groups / scales.float()[:, :, None]).round().clamp(-8, 7) + 8
    return codes.view(weights.shape), scales


def _values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (codes.reshape(len(codes), -1, GROUP) * scales.float()[:, :, None]).view(codes.shape)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """Return codes [8 * words, columns] as int32 [words, columns], from the lowest bits of a word on."""
    eights = rows.to(torch.int64).reshape(-1, _WORD, rows.shape[1])
    shifts = 4 * torch.arange(_WORD)[None, :, None]
    return _signed((eights << shifts).sum(1))


def _awq_words(rows: torch.Tensor) -> torch.Tensor:
    """Return codes [rows, 8 * words] as int32 [rows, words], in the order of AWQ's kernels."""
    eights = rows.to(torch.int64).reshape(len(rows), -1, _WORD)[:, :, list(_AWQ_ORDER)]
    return _signed((eights << 4 * torch.arange(_WORD)).sum(2))


def _signed(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
