"""Reads one rank's slice of a model from its folder.

Llama-shaped models run on our own decoder, which reads its slices from the files. Other families run on transformers'
modules, sliced by transformers' own tensor-parallel plan.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig

from engine.attention.backend import AttentionBackend
from engine.attention.cache import CacheGeometry
from engine.attention.declared_geometry import declared_geometry
from engine.attention.interface import ATTENTION_NAME, register
from engine.attention.llama_shape import LlamaShape, is_llama_shaped
from engine.errors import ModelUnsupported
from engine.model.checkpoint import Checkpoint
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loaded import LoadedModel, context_tokens, fingerprint
from engine.model.loading import take
from engine.model.sizing import check_ranks
from engine.model.staging import cuda_staging
from engine.model.text_part import folder_configuration, served_class
from engine.model.unsupported import unshared
from engine.model.weights import without_flags_warning
from engine.native.formats.finite import check_finite
from engine.native.formats.gguf.file import gguf_of
from engine.native.formats.image_text import image_text_type
from engine.native.formats.quantized.methods import scheme_of
from engine.parallel.llama import ParallelLlama
from engine.parallel.llama_slice import LlamaSlice
from engine.parallel.ranks import Ranks
from engine.parallel.shard import Shard
from engine.parallel.sliced_weights import SlicedWeights


@dataclass(frozen=True)
class ModelSlice:
    """One rank's slice. The geometry of `loaded` is that of this rank's cache; `decoder` reads the weights."""

    loaded: LoadedModel
    decoder: Callable[[AttentionBackend], Decoder]


class ModelFolder:
    """A model that `size` ranks can share; its weights are not read yet."""

    def __init__(self, folder: Path, size: int) -> None:
        """Read the configuration. Raises ModelUnsupported if the ranks cannot share the model."""
        self._folder = folder
        with _named(folder):
            quantized = scheme_of(folder) is not None
            self._whole: Any = folder_configuration(folder)
            kind, self._config = served_class(self._whole)
            register()
            with torch.device("meta"):
                model = kind._from_config(self._config, attn_implementation=ATTENTION_NAME)
            text = self._config.get_text_config()
            self._shape = _llama_shape(model) if is_llama_shaped(model) else None
            self._shapes = {name: list(one.shape) for name, one in model.state_dict().items()} if quantized else None
            parts = {"from_gguf": gguf_of(folder) is not None, "image_text": bool(image_text_type(folder))}
            if fault := unshared(model, quantized=quantized, **parts):
                raise ModelUnsupported(fault)
            check_ranks(size, text.num_attention_heads, declared_geometry(text))

    @property
    def fingerprint(self) -> str:
        """A hash of the configuration and of parts of the weights."""
        return fingerprint(self._folder)

    def load(self, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> ModelSlice:
        """Load this rank's slice. Raises ModelUnsupported if a tensor is missing, or if heads stay together."""
        with _named(self._folder):
            if self._shape:
                return self._llama(self._shape, ranks, dtype, device)
            return self._modules(ranks, dtype)

    def _llama(self, shape: LlamaShape, ranks: Ranks, dtype: torch.dtype, device: torch.device) -> ModelSlice:
        shard = Shard(ranks.rank, ranks.size)
        if self._shapes is not None:
            _check_shapes(Checkpoint(self._folder, dtype), self._shapes)
        weights = SlicedWeights(self._folder, dtype, device, cuda_staging(device) if device.type == "cuda" else None)
        loaded = LoadedModel(
            model=None,
            device=device,
            geometry=shard.local_geometry(CacheGeometry.uniform(shape.layers, shape.kv_heads, shape.head_size)),
            context_tokens=context_tokens(self._config),
            vocabulary_size=shape.vocabulary,
            eos_token_ids=_eos_token_ids(self._folder, self._whole),
            fingerprint=self._fingerprint_of(dtype),
            dtype=dtype,
            folder=self._folder,
            shape=shape,
        )
        context = loaded.context_tokens
        return ModelSlice(loaded, lambda backend: _decoder(LlamaSlice.read(shape, weights, ranks, context), backend))

    def _modules(self, ranks: Ranks, dtype: torch.dtype) -> ModelSlice:
        model = AutoModelForCausalLM.from_pretrained(
            self._folder,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            local_files_only=True,
            use_safetensors=True,
            distributed_config=DistributedConfig(tp_plan="auto", tp_size=ranks.size),
        )
        check_finite(
            (name, one.to_local() if isinstance(one, DTensor) else one) for name, one in model.named_parameters()
        )
        loaded = replace(take(model.eval(), self._fingerprint_of(dtype)), folder=self._folder)
        text = self._config.get_text_config()
        kept = [one.kv_heads for one in loaded.geometry.layers]
        whole = [one.kv_heads for one in declared_geometry(text).layers]
        if any(mine * ranks.size != all_heads for mine, all_heads in zip(kept, whole, strict=True)):
            raise ModelUnsupported(
                f"transformers' tensor-parallel plan for models of type {text.model_type!r} keeps {_counts(kept)} "
                f"of {_counts(whole)} KV heads on each of {ranks.size} ranks: tensor_parallel must be 1"
            )
        return ModelSlice(loaded, lambda backend: ModulesDecoder(loaded, backend))

    def _fingerprint_of(self, dtype: torch.dtype) -> str:
        return f"{self.fingerprint}-{str(dtype).removeprefix('torch.')}"


def _decoder(own: LlamaSlice, backend: AttentionBackend) -> Decoder:
    if not hasattr(backend, "write_rotated"):  # no import of Triton, which a CPU may lack
        return ParallelLlama(own, backend)
    from engine.gpu.triton_backend import TritonBackend
    from engine.parallel.fused_llama import FusedParallelLlama

    assert isinstance(backend, TritonBackend), "no other rotates"
    return FusedParallelLlama(own, backend)


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    """Reraise errors as ModelUnsupported with the model's name."""
    try:
        yield
    except (ModelUnsupported, ValueError, OSError, ImportError) as error:
        raise ModelUnsupported(f"{folder.name}: {str(error).strip().split(chr(10), 1)[0]}") from error


def _llama_shape(model: Any) -> LlamaShape:
    # Its frequencies are computed from the configuration, not read from a file.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return LlamaShape.of(model)


def _eos_token_ids(folder: Path, config: Any) -> frozenset[int]:
    named = (folder / "generation_config.json").exists()
    with without_flags_warning():
        given = GenerationConfig.from_pretrained(folder) if named else GenerationConfig.from_model_config(config)
    declared = given.eos_token_id
    if declared is None:
        return frozenset()
    return frozenset(declared if isinstance(declared, list) else [declared])


def _counts(kv_heads: list[int]) -> str:
    return " or ".join(str(count) for count in sorted(set(kv_heads)))


def _check_shapes(checkpoint: Checkpoint, shapes: Mapping[str, list[int]]) -> None:
    """Raise ModelUnsupported, naming the tensor, if files have one that the model lacks, or in another shape."""
    for name in checkpoint.names:
        if name not in shapes and not checkpoint.adds_nothing(name):
            raise ModelUnsupported(f"its files have the unknown tensor {name}")
        found = checkpoint.stored(name).get_shape()
        if name in shapes and list(found) != shapes[name]:
            raise ModelUnsupported(f"its tensor {name} has shape {list(found)}, but its configuration {shapes[name]}")
