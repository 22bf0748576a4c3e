"""Reads one rank's slice of a model from its folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from engine.attention.cache import CacheGeometry
from engine.attention.interface import ATTENTION_NAME, register
from engine.attention.llama_shape import LlamaShape, is_llama_shaped
from engine.errors import ModelUnsupported
from engine.model.loaded import LoadedModel, fingerprint
from engine.model.loading import context_tokens
from engine.parallel.shard import Shard, check
from engine.parallel.sliced_weights import SlicedWeights


@dataclass(frozen=True)
class ParallelModel:
    """A model of which every rank has a slice. The geometry of `loaded` is that of this rank's cache."""

    loaded: LoadedModel
    shape: LlamaShape
    weights: SlicedWeights


def load_slice(folder: Path, shard: Shard, dtype: torch.dtype, device: torch.device) -> ParallelModel:
    """Read the configuration, and open the weights. Raises ModelUnsupported if ranks cannot share the model."""
    try:
        return _load(folder, shard, dtype, device)
    except (ModelUnsupported, ValueError, OSError, ImportError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise ModelUnsupported(first if first.startswith(f"{folder.name}: ") else f"{folder.name}: {first}") from error


def _load(folder: Path, shard: Shard, dtype: torch.dtype, device: torch.device) -> ParallelModel:
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    shape = _shape(config)
    check(shard.size, shape.heads, shape.kv_heads)
    geometry = CacheGeometry(shape.layers, shape.kv_heads, shape.head_size)
    loaded = LoadedModel(
        model=None,
        device=device,
        geometry=shard.local_geometry(geometry),
        context_tokens=context_tokens(config),
        vocabulary_size=shape.vocabulary,
        eos_token_ids=_eos_token_ids(folder, config),
        fingerprint=f"{fingerprint(folder)}-{str(dtype).removeprefix('torch.')}",
        dtype=dtype,
        folder=folder,
        shape=shape,
    )
    return ParallelModel(loaded, shape, SlicedWeights(folder, dtype, device))


def _shape(config: Any) -> LlamaShape:
    """Return the shape of a Llama-shaped model, from modules without weights."""
    register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    if not is_llama_shaped(model):
        raise ModelUnsupported(f"models of type {config.model_type!r} run on one rank only: tensor_parallel must be 1")
    # Its frequencies are computed from the configuration, not read from a file.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return LlamaShape.of(model)


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    generation = folder / "generation_config.json"
    declared = GenerationConfig.from_pretrained(folder).eos_token_id if generation.exists() else config.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])
