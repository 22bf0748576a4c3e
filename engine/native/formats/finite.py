"""Refuses weights that are NaN or infinite: the answers of such a model would be garbage."""

from collections.abc import Iterable

import torch

from engine.errors import ModelUnsupported


def check_finite(tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype | None = None) -> None:
    """Raise ModelUnsupported, with the first name, if a floating-point tensor has values that are NaN or infinite.

    With `dtype`, which the values will have, they must not be too large for it either. Each tensor is read once,
    without a copy, and the device is waited for once.
    """
    named = [(name, one) for name, one in tensors if one.is_floating_point() and one.numel()]
    if not named:
        return
    extremes = torch.stack([torch.stack(torch.aminmax(one)).float() for _, one in named])  # NaN is both
    extremes = extremes.to(dtype) if dtype else extremes
    for (name, one), finite in zip(named, extremes.isfinite().all(dim=1).tolist(), strict=True):
        if not finite:
            kind = str(dtype or one.dtype).removeprefix("torch.")
            raise ModelUnsupported(f"its tensor {name} has weights that are not finite, or too large for {kind}")
