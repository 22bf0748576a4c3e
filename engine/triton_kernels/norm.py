"""Root-mean-square normalisation (Zhang and Sennrich, 2019), with the residual's addition before it in one launch."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.tuning import INTERPRETED


def normalize(
    hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, output: torch.Tensor, added: torch.Tensor | None = None
) -> None:
    """Write `hidden / rms(hidden) * weight` to `output`, computed in float32.

    `hidden`, `output`, `added`: `[tokens, size]`, each row in one piece; `weight`: `[size]`. With `added`, `hidden`
    becomes `hidden + added` first, rounded to its type, and it is that sum which is normalized.
    """
    tokens, size = hidden.shape
    if not tokens:
        return
    width = triton.next_power_of_2(size)
    _normalize[(tokens,)](
        hidden,
        hidden if added is None else added,
        weight,
        output,
        hidden.stride(0),
        0 if added is None else added.stride(0),
        output.stride(0),
        epsilon,
        SIZE=size,
        WIDTH=width,
        ADDED=added is not None,
        INTERPRETED=INTERPRETED,
        num_warps=min(16, max(1, width // 512)),
    )


@triton.jit
def _normalize(
    hidden,
    added,
    weight,
    output,
    hidden_stride,
    added_stride,
    output_stride,
    epsilon,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Normalize one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    there = columns < SIZE
    row = widened(tl.load(hidden + token * hidden_stride + columns, mask=there, other=0), INTERPRETED).to(tl.float32)
    if ADDED:
        more = tl.load(added + token * added_stride + columns, mask=there, other=0)
        total = rounded(row + widened(more, INTERPRETED).to(tl.float32), hidden.dtype.element_ty, INTERPRETED)
        tl.store(hidden + token * hidden_stride + columns, total, mask=there)
        row = widened(total, INTERPRETED).to(tl.float32)
    factor = tl.rsqrt(tl.sum(row * row, 0) / SIZE + epsilon)
    scale = widened(tl.load(weight + columns, mask=there, other=0), INTERPRETED).to(tl.float32)
    normalized = rounded(row * factor * scale, output.dtype.element_ty, INTERPRETED)
    tl.store(output + token * output_stride + columns, normalized, mask=there)
