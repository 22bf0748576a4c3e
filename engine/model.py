"""Loads a model through transformers, with paged attention in the place of its own."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.interface import ATTENTION_NAME, PagedContext, register
from engine.blocks import Copy
from engine.cache import CacheGeometry
from engine.errors import ModelUnsupported

_SAMPLED_BYTES = 65536
_KNOWN_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model whose attention is ours.

    `model(input_ids, position_ids, logits_to_keep=..., paged=...)` runs it on one row of flattened tokens.
    """

    model: Any
    geometry: CacheGeometry
    context_tokens: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    fingerprint: str
    dtype: torch.dtype


class _Probe:
    """An attention backend that computes nothing, but notes what each layer hands over.

    Raises ModelUnsupported where that has no place in a KV cache.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.windows: dict[int, int | None] = {}

    def block_shape(self) -> tuple[int, ...]:
        return ()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, _batch: PagedBatch) -> None:
        if layer in self.shapes:
            raise ModelUnsupported(f"its layer {layer} attends more than once")
        if key.shape != value.shape:
            raise ModelUnsupported(f"its keys and values differ in shape, {list(key.shape)} and {list(value.shape)}")
        self.shapes[layer] = (key.shape[1], key.shape[2])

    def attend(self, layer: int, query: torch.Tensor, _batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        self.windows[layer] = scoring.window
        return query

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        pass

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        pass


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Load a Hugging Face folder. Raises ModelUnsupported, with the reason, for a model that cannot be served."""
    register()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=True
        )
        model = model.to(device).eval()
        geometry = _geometry(model)
    except KeyError as error:
        raise ModelUnsupported(f"{folder.name}: it does not use transformers' attention interface ({error})") from error
    except (ModelUnsupported, ValueError, OSError) as error:
        raise ModelUnsupported(f"{folder.name}: {_first_line(error)}") from error
    config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        geometry=geometry,
        context_tokens=config.max_position_embeddings,
        vocabulary_size=config.vocab_size,
        eos_token_ids=_eos_token_ids(model),
        fingerprint=f"{fingerprint(folder)}-{str(dtype).removeprefix('torch.')}",
        dtype=dtype,
    )


def fingerprint(folder: Path) -> str:
    """Identify a model's configuration and weights: a hash of its config and of each weight file's size and ends.

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


def _geometry(model: Any) -> CacheGeometry:
    """Run one token through the model, and see which layers come to paged attention with what heads."""
    probe = _Probe()
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    paged = PagedContext(probe, PagedBatch.of((), 1, model.device))
    try:
        with torch.inference_mode():
            model(input_ids=token, position_ids=token, use_cache=False, paged=paged)
    except (TypeError, AttributeError, RuntimeError) as error:
        raise ModelUnsupported(f"it does not run with paged attention: {_first_line(error)}") from error
    config = model.config.get_text_config()
    layers = config.num_hidden_layers
    if sorted(probe.shapes) != list(range(layers)):
        raise ModelUnsupported(
            f"only {len(probe.shapes)} of {layers} layers use transformers' attention interface, "
            "so paged attention cannot take their place"
        )
    if len(set(probe.shapes.values())) != 1:
        raise ModelUnsupported(f"its layers differ in KV heads or head size, {sorted(set(probe.shapes.values()))}")
    for layer, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in _KNOWN_LAYERS or (kind == "sliding_attention" and probe.windows[layer] is None):
            raise ModelUnsupported(f"its layer {layer} is of type {kind}, which paged attention does not know")
    return CacheGeometry(layers, *probe.shapes[0])


def _eos_token_ids(model: Any) -> frozenset[int]:
    declared = model.generation_config.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0]
