"""A loaded model, and the identity of its files."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.attention.cache import CacheGeometry
from engine.attention.llama_shape import LlamaShape
from engine.errors import ModelUnsupported
from engine.native.formats.quantized.declared import DECLARATIONS

# Longer contexts are served up to here, whatever a model declares: what a block step of the KV manager carries.
MAX_CONTEXT_TOKENS = 1 << 20
_SAMPLED_BYTES = 65536
# Headers of GGUF files have the vocabulary before the tensors' places.
_GGUF_HEADER_BYTES = 16 << 20


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model with paged attention. `kv_dtype` is the type of the KV cache, unless it is `dtype`.

    `model(input_ids, position_ids, logits_to_keep=..., paged=...)` runs it on one row of flattened tokens; `model` is
    None if a decoder runs a model of this `shape` without its modules. `folder` has its files. `weights` is the format
    of weights that stay quantized, such as Q4_1 or int8; empty if they are of `dtype`.
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
    kv_dtype: torch.dtype | None = None
    weights: str = ""

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the KV cache: int8 has a scale for each token and head, see `engine.attention.codes`."""
        return self.kv_dtype or self.dtype

    @property
    def weight_format(self) -> str:
        """Format of the quantized weights; without any, the name of `dtype`."""
        return self.weights or dtype_name(self.dtype)


def with_kv_dtype(loaded: LoadedModel, kv_dtype: torch.dtype | None) -> LoadedModel:
    """Return the model with a KV cache of this type, None for the model's own, which its fingerprint then names."""
    if kv_dtype in (None, loaded.dtype):
        return loaded
    name = str(kv_dtype).removeprefix("torch.")
    return replace(loaded, kv_dtype=kv_dtype, fingerprint=f"{loaded.fingerprint}-kv-{name}")


def fingerprint(folder: Path) -> str:
    """Return a hash of a model's configuration, what declares its quantization, and size and ends of each weight file.

    The ends hold the tensor names and the last weights; reading all of a large model would take minutes. Raises OSError
    if a file cannot be read.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for declaration in filter(Path.is_file, (folder / name for name in DECLARATIONS)):
        digest.update(declaration.read_bytes())
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.gguf"))
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(_GGUF_HEADER_BYTES if file.suffix == ".gguf" else _SAMPLED_BYTES))
            weights.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(weights.read())
    return digest.hexdigest()[:32]


def fingerprint_of(folder: Path, dtype: torch.dtype, weights: str = "") -> str:
    """Return the fingerprint of a folder's model with this type and format of weights (`LoadedModel.weights`)."""
    return f"{fingerprint(folder)}-{dtype_name(dtype)}" + (f"-{weights}" if weights else "")


def context_tokens(config: Any) -> int:
    """Return the maximum tokens of a sequence, up to MAX_CONTEXT_TOKENS. Raises ModelUnsupported if it is not declared.

    Rotations of type longrope change for all positions when the longest sequence of a batch exceeds the original
    context. Cached keys and other sequences would become wrong, so the served context ends there.
    """
    declared = getattr(config, "max_position_embeddings", None)
    if not isinstance(declared, int):
        raise ModelUnsupported("its configuration lacks the context length (max_position_embeddings)")
    rotations = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [rotation for rotation in rotations.values() if isinstance(rotation, dict)]
    lengths: list[int] = [
        rotation["original_max_position_embeddings"]
        for rotation in by_layer_type or [rotations]
        if rotation.get("rope_type") == "longrope"
    ]
    return min([declared, *lengths, MAX_CONTEXT_TOKENS])


def vocabulary_size(config: Any) -> int:
    """Return the number of token ids that a model can be fed.

    Gemma-3n and Gemma-4 embed tokens in each layer, too, and these tables may have fewer rows than there are logits.
    """
    size: int = config.vocab_size
    if getattr(config, "hidden_size_per_layer_input", 0):
        size = min(size, config.vocab_size_per_layer_input)
    return size


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type, such as bfloat16."""
    return str(dtype).removeprefix("torch.")
