"""A Llama-shaped model run entirely by the kernels: one call for a step, instead of hundreds of modules.

Its layers may have mixtures of experts, whose weights are packed side by side.

Activations are float32, K and V bfloat16. Weights are bfloat16, or quantized as their files hold them; activations that
quantized weights multiply are quantized to 8 bits.
"""

from collections.abc import Iterator
from ctypes import POINTER, cast
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from engine.attention.backend import PagedBatch
from engine.attention.llama_shape import ExpertsShape, LlamaShape, head_size, is_llama_shaped, is_mixture
from engine.attention.upload import IntegerType
from engine.errors import ModelUnsupported
from engine.native.grouped_strips import OUTPUTS
from engine.native.kernels import MAX_HEAD_SIZE, Kernels, LayerCaches, NativeExperts, NativeLayer, NativeModel
from engine.native.llama_weights import EMBEDDING, HEAD, FileWeights, LlamaWeights
from engine.native.matrix_packer import MatrixPacker, alternating

_INPUTS = 32  # to whose multiples the kernels pad inputs


def runs(model: Any) -> bool:
    """Return whether NativeDecoder supports a model."""
    if not (is_llama_shaped(model) or is_mixture(model)):
        return False
    size = head_size(model.config)
    return all(one % OUTPUTS == 0 for one in (size, *_inner_sizes(model))) and size <= MAX_HEAD_SIZE


def _inner_sizes(model: Any) -> Iterator[int]:
    """Yield the elements of a gated product, of layers with and without experts."""
    experts = ExpertsShape.of(model)
    if experts is None or not all(experts.layers):
        yield model.config.intermediate_size
    if experts is not None:
        yield experts.intermediate


class NativeDecoder:
    """Runs the steps of one model over one cache."""

    integers: IntegerType = np.int32

    def __init__(
        self,
        kernels: Kernels,
        shape: LlamaShape,
        weights: LlamaWeights,
        caches: LayerCaches,
        context_tokens: int,
        threads: int,
    ) -> None:
        """Pack the weights of a Llama-shaped model. `caches` are those of its layers.

        Positions are below `context_tokens`.

        Raises ModelUnsupported if a tensor is missing.
        """
        self._kernels = kernels
        self.from_files = isinstance(weights, FileWeights)
        self._caches = caches
        self._threads = threads
        described = _Description(weights, MatrixPacker(kernels, weights, threads))
        self._model = described.model(shape, context_tokens)
        self._layers, self._kept = described.layers, described.kept  # what the structures point to

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these indices."""
        tokens = tuple(one if one.dtype == torch.int32 else one.int() for one in (token_ids, positions, places))
        return self._kernels.step(self._model, self._caches, batch, tokens, self._threads)


class _Description:
    """Describes a model to the kernels, and packs its weights."""

    def __init__(self, weights: LlamaWeights, packer: MatrixPacker) -> None:
        self._weights = weights
        self._packer = packer
        self.kept = packer.kept

    def model(self, shape: LlamaShape, context_tokens: int) -> NativeModel:
        described = NativeModel(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_size=shape.head_size,
            intermediate=shape.intermediate,
            vocabulary=shape.vocabulary,
            epsilon=shape.epsilon,
            scaling=shape.scaling,
            experts=_native_experts(shape.experts),
        )
        self.layers = (NativeLayer * shape.layers)(*(self._layer(number, shape) for number in range(shape.layers)))
        described.layer = cast(self.layers, POINTER(NativeLayer))
        described.embedding = self._packer.matrix(EMBEDDING)
        described.head = described.embedding if self._weights.tied() else self._packer.matrix(HEAD)
        described.final_norm = self._float(self._tensor("model.norm.weight"))
        described.cosine, described.sine = map(self._float, shape.rotations(context_tokens))
        return described

    def _layer(self, number: int, shape: LlamaShape) -> NativeLayer:
        layer, attention = f"model.layers.{number}", f"model.layers.{number}.self_attn"
        projections = [f"{attention}.{name}_proj" for name in "qkv"]
        described = NativeLayer(window=shape.windows[number])
        described.projections = self._packer.matrix(*(f"{one}.weight" for one in projections))
        described.output = self._packer.matrix(f"{attention}.o_proj.weight")
        if shape.experts and shape.experts.layers[number]:
            self._mixture(described, f"{layer}.mlp", shape.experts)
        else:
            described.gates, described.down = self._packer.mlp(*_mlp_names(f"{layer}.mlp"))
        described.attention_norm = self._float(self._tensor(f"{layer}.input_layernorm.weight"))
        described.mlp_norm = self._float(self._tensor(f"{layer}.post_attention_layernorm.weight"))
        if self._optional(f"{projections[0]}.bias") is not None:
            described.projection_bias = self._float(torch.cat([self._tensor(f"{one}.bias") for one in projections]))
        if (norm := self._optional(f"{attention}.q_norm.weight")) is not None:
            described.query_norm = self._float(norm)
            described.key_norm = self._float(self._tensor(f"{attention}.k_norm.weight"))
        described.output_bias = self._optional_float(f"{attention}.o_proj.bias")
        described.sinks = self._optional_float(f"{attention}.sinks")
        return described

    def _mixture(self, described: NativeLayer, mlp: str, shape: ExpertsShape) -> None:
        """Describe a layer's router and experts. GPT-OSS has biases, in which gate and up alternate."""
        router = self._optional(f"{mlp}.gate.weight")
        described.router = self._float(_router(self._tensor(f"{mlp}.router.weight") if router is None else router))
        described.router_bias = self._optional_float(f"{mlp}.router.bias")
        described.gates, described.down = self._packer.experts(
            [_mlp_names(f"{mlp}.experts.{one}") for one in range(shape.count)]
        )
        if (bias := self._optional(f"{mlp}.experts.gate_up_proj_bias")) is not None:
            gates = [alternating(one[::2, None], one[1::2, None]) for one in bias]
            described.gates_bias = self._float(torch.cat(gates))
            down = self._tensor(f"{mlp}.experts.down_proj_bias")
            described.down_bias = self._float(pad(down, (0, -down.shape[1] % OUTPUTS)))

    def _optional_float(self, name: str) -> int | None:
        found = self._optional(name)
        return None if found is None else self._float(found)

    def _optional(self, name: str) -> torch.Tensor | None:
        return self._weights.tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        found = self._optional(name)
        if found is None:
            raise ModelUnsupported(f"its weights have no tensor {name}")
        return found

    def _float(self, values: torch.Tensor) -> int:
        kept = values.detach().float().contiguous()
        self.kept.append(kept)
        return kept.data_ptr()


def _mlp_names(mlp: str) -> list[str]:
    return [f"{mlp}.{name}_proj.weight" for name in ("gate", "up", "down")]


def _native_experts(shape: ExpertsShape | None) -> NativeExperts:
    if shape is None:
        return NativeExperts()
    return NativeExperts(shape.count, shape.chosen, shape.intermediate, shape.of_all, shape.limit, shape.alpha)


def _router(weights: torch.Tensor) -> torch.Tensor:
    """Return `[experts, inputs]` weights as float32 `[experts / 16, inputs, 16]`, padded with zeros."""
    experts, inputs = weights.shape
    padded = pad(weights.float(), (0, -inputs % _INPUTS, 0, -experts % OUTPUTS))
    return padded.view(-1, OUTPUTS, padded.shape[1]).transpose(1, 2)
