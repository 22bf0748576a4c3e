"""K and V in 8 bits: an integer for each element, and a scale for each token and head.

x = scale * code, with scale = max |x| / 127 rounded to bfloat16, and code = x / scale rounded to the nearest integer.
So a token's codes depend on its own K and V only, whatever else was computed with it; these must not depend on it in
their last bits either, because one changed code changes most codes of later layers. This is symmetric quantization
of each row, as in LLM.int8() (Dettmers et al. 2022) for activations.

bfloat16 scales have the range of the elements in half the bytes of float32; float16 ones would lose small heads. Their
rounding costs no accuracy, because codes are computed with the rounded scale.
"""

from typing import NamedTuple

import torch

from engine.attention.cache import SCALE_BYTES

LARGEST_CODE = 127


class Codes(NamedTuple):
    """Heads of tokens in 8 bits: `codes` `[..., head_size]` int8, `scales` `[...]` bfloat16."""

    codes: torch.Tensor
    scales: torch.Tensor


def encode(heads: torch.Tensor) -> Codes:
    """Encode `[..., head_size]` floating-point heads.

    A head with an element that is not finite has such a scale. A head without normal numbers has the scale 0.
    """
    exact = heads.float()
    largest = exact.abs().amax(dim=-1)
    scales = torch.where(largest.isfinite(), largest / LARGEST_CODE, largest).to(torch.bfloat16)
    scales = scales.masked_fill(scales < torch.finfo(torch.bfloat16).smallest_normal, 0)  # the inverse may be infinite
    inverses = torch.where(scales > 0, 1 / scales.float(), 0)
    codes = (exact * inverses[..., None]).nan_to_num(0).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return Codes(codes.to(torch.int8), scales)


def decode(codes: Codes) -> torch.Tensor:
    """Return the `[..., head_size]` heads of codes in float32, which is exact."""
    return codes.codes.float() * codes.scales.float()[..., None]


def packed(codes: Codes) -> torch.Tensor:
    """Return `[..., head_size + 2]` int8: the codes of each head, then the bytes of its scale."""
    return torch.cat([codes.codes, codes.scales[..., None].view(torch.int8)], dim=-1)


def unpacked(stored: torch.Tensor) -> Codes:
    """Return what `packed` has packed."""
    codes, scales = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:]
    return Codes(codes, scales.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)[..., 0])
