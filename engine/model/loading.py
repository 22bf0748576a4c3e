"""Loads a model through transformers, with paged attention instead of its own."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from engine.attention.cache import CacheGeometry
from engine.attention.interface import ATTENTION_NAME, register
from engine.errors import ModelUnsupported
from engine.model.probe import probe

_SAMPLED_BYTES = 65536


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model with paged attention.

    `model(input_ids, position_ids, logits_to_keep=..., paged=...)` runs it on one row of flattened tokens.
    """

    model: Any
    geometry: CacheGeometry
    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    dtype: torch.dtype


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load a Hugging Face folder. Raises ModelUnsupported with the reason if the model cannot be served."""
    register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
        )
        return take(model.to(device).eval(), f"{fingerprint(folder)}-{str(dtype).removeprefix('torch.')}")
    except KeyError as error:
        raise ModelUnsupported(
            f"{folder.name}: it does not use transformers' attention interface, but selects its attention by name "
            f"and has none named {error}"
        ) from error
    except StrictDataclassError as error:
        raise ModelUnsupported(f"{folder.name}: {' '.join(str(error).split())}") from error
    except (ModelUnsupported, ValueError, OSError, ImportError) as error:
        raise ModelUnsupported(f"{folder.name}: {_first_line(error)}") from error


def take(model: Any, fingerprint: str) -> LoadedModel:
    """Wrap a model that was created with attention ATTENTION_NAME, after `register`.

    Raises ModelUnsupported with the reason if it cannot be served.
    """
    config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        geometry=probe(model),
        context_tokens=context_tokens(config),
        vocabulary_size=config.vocab_size,
        eos_token_ids=_eos_token_ids(model),
        fingerprint=fingerprint,
        dtype=model.dtype,
    )


def context_tokens(config: Any) -> int:
    """Return the maximum tokens of a sequence. Raises ModelUnsupported if the configuration lacks it.

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
    return min([declared, *lengths])


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


def _eos_token_ids(model: Any) -> frozenset[int]:
    declared = model.generation_config.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
