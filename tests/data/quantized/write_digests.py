"""What `dequantized.json` says of a matrix."""

import hashlib
from typing import Any

import torch


def digest(weight: torch.Tensor) -> dict[str, Any]:
    """Return the digest of a matrix's bfloat16 values, and their sum of squares. 0 stands for -0 too."""
    values = (weight.to(torch.bfloat16) + 0).contiguous()
    data = values.view(torch.int16).numpy().astype("<i2").tobytes()
    return {"bfloat16": hashlib.sha256(data).hexdigest(), "squares": float(values.double().square().sum())}
