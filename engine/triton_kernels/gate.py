"""The gate of a Llama-shaped MLP: SiLU of one half of a product, times the other half (SwiGLU; Shazeer, 2020)."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.tuning import INTERPRETED

_COLUMNS = 1024


def gate(projected: torch.Tensor, output: torch.Tensor) -> None:
    """Write `silu(gates) * values` to `output`, computed in float32.

    `projected`: `[tokens, 2 * size]`, gates and then values; `output`: `[tokens, size]`; each row in one piece.
    """
    tokens, size = output.shape
    if tokens:
        _gate[(tokens, -(-size // _COLUMNS))](
            projected,
            output,
            projected.stride(0),
            output.stride(0),
            SIZE=size,
            COLUMNS=_COLUMNS,
            INTERPRETED=INTERPRETED,
            num_warps=4,
        )


@triton.jit
def _gate(
    projected,
    output,
    projected_stride,
    output_stride,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Gate a part of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    there = columns < SIZE
    source = projected + token * projected_stride + columns
    gates = widened(tl.load(source, mask=there, other=0), INTERPRETED).to(tl.float32)
    values = widened(tl.load(source + SIZE, mask=there, other=0), INTERPRETED).to(tl.float32)
    # exp of no positive number: nothing overflows, whatever a gate is.
    shrunk = tl.exp(-tl.abs(gates))
    share = tl.where(gates < 0, shrunk, 1.0) / (1.0 + shrunk)
    gated = rounded(gates * share * values, output.dtype.element_ty, INTERPRETED)
    tl.store(output + token * output_stride + columns, gated, mask=there)
