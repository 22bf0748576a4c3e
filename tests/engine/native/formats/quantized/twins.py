"""Dequantizes any committed folder of a format's own library, from the documented layouts."""

from pathlib import Path

import torch

from tests.engine.native.formats.quantized import twins_compressed, twins_experts

# Kinds of folders by what their names begin with.
COMPRESSED, EXPERTS, GGUF = ("compressed", "fp8", "modelopt"), ("mxfp4", "bitsandbytes"), ("gguf",)


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Return a folder's tensors under dense names, quantized ones in float32."""
    twin = twins_compressed if folder.name.startswith(COMPRESSED) else twins_experts
    return twin.dequantized(folder)
