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

    Parts `[parts, tokens, hidden]` of `computed`, those of ranks, are all added, in their order in float32. The sum is
    rounded to the residual's dtype before the norm, and the quotient before it is weighted, as in transformers'
    modules.
    """
    tokens, hidden = residual.shape
    normed = torch.empty_like(residual)
    elements = triton.next_power_of_2(hidden)
    parts = 0 if computed is None else len(computed) if computed.dim() == 3 else 1
    if tokens:
        _add_and_norm[(tokens,)](
            residual,
            residual if computed is None else computed,
            weight,
            normed,
            tokens,
            epsilon,
            PARTS=parts,
            HIDDEN=hidden,
            ELEMENTS=elements,
            INTERPRETED=INTERPRETED,
            num_warps=min(16, max(1, elements // _WARP_ELEMENTS)),
        )
    return normed


@triton.jit(do_not_specialize=["tokens"])
def _add_and_norm(
    residual,
    computed,
    weight,
    normed,
    tokens,
    epsilon,
    PARTS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ELEMENTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    element = tl.arange(0, ELEMENTS)
    there = element < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + element
    kind = residual.dtype.element_ty
    row = widened(tl.load(residual + place, mask=there, other=0), INTERPRETED).to(tl.float32)
    if PARTS:
        for part in tl.static_range(PARTS):
            row += widened(tl.load(computed + place, mask=there, other=0), INTERPRETED).to(tl.float32)
            if part + 1 < PARTS:
                computed += tokens.to(tl.int64) * HIDDEN
        summed = rounded(row, kind, INTERPRETED)
        tl.store(residual + place, summed, mask=there)
        row = widened(summed, INTERPRETED).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(row * row, 0) / HIDDEN + epsilon)
    quotient = widened(rounded(row * scale, kind, INTERPRETED), INTERPRETED).to(tl.float32)
    weights = widened(tl.load(weight + element, mask=there, other=0), INTERPRETED).to(tl.float32)
    tl.store(normed + place, rounded(quotient * weights, kind, INTERPRETED), mask=there)
