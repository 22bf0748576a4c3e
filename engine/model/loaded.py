"""A loaded model, and the identity of its files."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.cache import CacheGeometry
from engine.attention.llama_shape import LlamaShape

_SAMPLED_BYTES = 65536


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model with paged attention.

    `model(input_ids, position_ids, logits_to_keep=..., paged=...)` runs it on one row of flattened tokens; `model` is
    None if a decoder runs a model of this `shape` without its modules. `folder` has its files.
    """

    model: Any
    device: torch.device
    geometry: CacheGeometry
    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    dtype: torch.dtype
    folder: Path | None = None
    shape: LlamaShape | None = None


def fingerprint(folder: Path) -> str:
    """Return a hash of a model's configuration, and of the size and both ends of each weight file.

    The ends hold the tensor names and the last weights; reading all of a large model would take minutes.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(_SAMPLED_BYTES))
            weights.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(weights.read())
    return digest.hexdigest()[:32]
