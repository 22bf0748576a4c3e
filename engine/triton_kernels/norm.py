"""Adds a layer's output to the residual, and normalizes the sum for the next layer (RMSNorm, Zhang et al. 2019)."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.tuning import INTERPRETED

_WARP_ELEMENTS = 512  # of a row, for each warp


def add_and_norm(
    residual: torch.Tensor, computed: torch.Tensor | None, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """Add `computed`, if given, to `residual` in place; return the sum's RMSNorm. Both `[tokens, hidden]`.

    The sum is rounded to the residual's dtype before the norm, and the quotient before it is weighted, as in
    transformers' modules.
    """
    tokens, hidden = residual.shape
    normed = torch.empty_like(residual)
    elements = triton.next_power_of_2(hidden)
    if tokens:
        _add_and_norm[(tokens,)](
            residual,
            residual if computed is None else computed,
            weight,
            normed,
            epsilon,
            ADDS=computed is not None,
            HIDDEN=hidden,
            ELEMENTS=elements,
            INTERPRETED=INTERPRETED,
            num_warps=min(16, max(1, elements // _WARP_ELEMENTS)),
        )
    return normed


@triton.jit
def _add_and_norm(
    residual,
    computed,
    weight,
    normed,
    epsilon,
    ADDS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    element = tl.arange(0, ELEMENTS)
    there = element < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + element
    kind = residual.dtype.element_ty
    row = widened(tl.load(residual + place, mask=there, other=0), INTERPRETED).to(tl.float32)
    if ADDS:
        row += widened(tl.load(computed + place, mask=there, other=0), INTERPRETED).to(tl.float32)
        summed = rounded(row, kind, INTERPRETED)
        tl.store(residual + place, summed, mask=there)
        row = widened(summed, INTERPRETED).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(row * row, 0) / HIDDEN + epsilon)
    quotient = widened(rounded(row * scale, kind, INTERPRETED), INTERPRETED).to(tl.float32)
    weights = widened(tl.load(weight + element, mask=there, other=0), INTERPRETED).to(tl.float32)
    tl.store(normed + place, rounded(quotient * weights, kind, INTERPRETED), mask=there)
