"""The gate of a gated MLP (SwiGLU, Shazeer 2020)."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.tuning import INTERPRETED

_ELEMENTS = 1 << 16 if INTERPRETED else 1024  # of one program


def silu_gated(gates: torch.Tensor) -> torch.Tensor:
    """Return `silu(left) * right` of `[tokens, 2 * size]` contiguous halves: `[tokens, size]`."""
    tokens, width = gates.shape
    size = width // 2
    gated = torch.empty(tokens, size, dtype=gates.dtype, device=gates.device)
    if tokens:
        elements = min(_ELEMENTS, triton.next_power_of_2(size))
        _silu_gated[(tokens, triton.cdiv(size, elements))](
            gates, gated, SIZE=size, ELEMENTS=elements, INTERPRETED=INTERPRETED, num_warps=4
        )
    return gated


@triton.jit
def _silu_gated(gates, gated, SIZE: tl.constexpr, ELEMENTS: tl.constexpr, INTERPRETED: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    there = element < SIZE
    kind = gated.dtype.element_ty
    left = widened(tl.load(gates + token * (2 * SIZE) + element, mask=there, other=0), INTERPRETED).to(tl.float32)
    right = widened(tl.load(gates + token * (2 * SIZE) + SIZE + element, mask=there, other=0), INTERPRETED)
    # Rounded in between, as in transformers' modules.
    opened = widened(rounded(left / (1 + tl.exp(-left)), kind, INTERPRETED), INTERPRETED).to(tl.float32)
    tl.store(gated + token * SIZE + element, rounded(opened * right.to(tl.float32), kind, INTERPRETED), mask=there)
