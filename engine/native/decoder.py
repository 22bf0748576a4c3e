"""A Llama-shaped model run entirely by the kernels: one call for a step, instead of hundreds of modules.

Activations are float32; weights, K and V are bfloat16.
"""

from ctypes import POINTER, cast
from typing import Any

import numpy as np
import torch

from engine.attention.backend import PagedBatch
from engine.attention.llama_shape import LlamaShape, head_size, is_llama_shaped
from engine.attention.upload import IntegerType
from engine.errors import ModelUnsupported
from engine.native.kernels import MAX_HEAD_SIZE, CacheView, Kernels, NativeLayer, NativeModel, packed_size
from engine.native.llama_weights import EMBEDDING, HEAD, FileWeights, LlamaWeights

_ROOM = 32 << 20  # elements allocated at once for packed weights
_COLUMNS = 16  # columns of gate and gated product that alternate


def runs(model: Any) -> bool:
    """Return whether NativeDecoder supports a model."""
    if not is_llama_shaped(model):
        return False
    size = head_size(model.config)
    return model.config.intermediate_size % _COLUMNS == 0 and size % _COLUMNS == 0 and size <= MAX_HEAD_SIZE


class NativeDecoder:
    """Runs the steps of one model over one cache."""

    integers: IntegerType = np.int32

    def __init__(
        self,
        kernels: Kernels,
        shape: LlamaShape,
        weights: LlamaWeights,
        view: CacheView,
        context_tokens: int,
        threads: int,
    ) -> None:
        """Pack the weights of a Llama-shaped model. Positions are below `context_tokens`.

        Raises ModelUnsupported if a tensor is missing.
        """
        self._kernels = kernels
        self.from_files = isinstance(weights, FileWeights)
        self._weights: LlamaWeights | None = weights  # until they are packed
        self._view = view
        self._threads = threads
        self._kept: list[torch.Tensor] = []  # tensors that the structures point to
        self._room = torch.empty(0, dtype=torch.bfloat16)  # for the next packed weights
        self._model = self._native_model(shape, context_tokens)
        self._weights = None

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these indices."""
        tokens = tuple(one if one.dtype == torch.int32 else one.int() for one in (token_ids, positions, places))
        return self._kernels.step(self._model, self._view, batch, tokens, self._threads)

    def _native_model(self, shape: LlamaShape, context_tokens: int) -> NativeModel:
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
        )
        self._layers = (NativeLayer * shape.layers)(*(self._layer(number, shape) for number in range(shape.layers)))
        described.layer = cast(self._layers, POINTER(NativeLayer))
        described.embedding = self._keep(self._tensor(EMBEDDING).to(torch.bfloat16).contiguous())
        described.head = self._pack(self._tensor(HEAD))
        described.final_norm = self._float(self._tensor("model.norm.weight"))
        described.cosine, described.sine = map(self._float, shape.rotations(context_tokens))
        return described

    def _layer(self, number: int, shape: LlamaShape) -> NativeLayer:
        layer, attention = f"model.layers.{number}", f"model.layers.{number}.self_attn"
        projections = [f"{attention}.{name}_proj" for name in "qkv"]
        described = NativeLayer(window=shape.windows[number])
        described.projections = self._pack(torch.cat([self._tensor(f"{one}.weight") for one in projections]))
        described.output = self._pack(self._tensor(f"{attention}.o_proj.weight"))
        gate, gated = (self._tensor(f"{layer}.mlp.{name}_proj.weight") for name in ("gate", "up"))
        described.gates = self._pack(_alternating(gate, gated))
        described.down = self._pack(self._tensor(f"{layer}.mlp.down_proj.weight"))
        described.attention_norm = self._float(self._tensor(f"{layer}.input_layernorm.weight"))
        described.mlp_norm = self._float(self._tensor(f"{layer}.post_attention_layernorm.weight"))
        if self._optional(f"{projections[0]}.bias") is not None:
            described.projection_bias = self._float(torch.cat([self._tensor(f"{one}.bias") for one in projections]))
        if (norm := self._optional(f"{attention}.q_norm.weight")) is not None:
            described.query_norm = self._float(norm)
            described.key_norm = self._float(self._tensor(f"{attention}.k_norm.weight"))
        return described

    def _optional(self, name: str) -> torch.Tensor | None:
        assert self._weights is not None
        return self._weights.tensor(name)

    def _tensor(self, name: str) -> torch.Tensor:
        found = self._optional(name)
        if found is None:
            raise ModelUnsupported(f"its weights have no tensor {name}")
        return found

    def _pack(self, weights: torch.Tensor) -> int:
        count = packed_size(weights)
        if count > len(self._room):  # matrices share large pages, because most would not fill one
            self._room = self._kernels.zeros([max(count, _ROOM)], torch.bfloat16)
        packed, self._room = self._room[:count], self._room[count:]
        self._kernels.pack(weights, packed)
        return self._keep(packed)

    def _float(self, values: torch.Tensor) -> int:
        return self._keep(values.detach().float().contiguous())

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()


def _alternating(gate: torch.Tensor, gated: torch.Tensor) -> torch.Tensor:
    """Return 16 rows of `gate`, 16 of `gated`, and so on."""
    rows, inputs = gate.shape
    pieces = [weights.view(rows // _COLUMNS, _COLUMNS, inputs) for weights in (gate, gated)]
    return torch.stack(pieces, dim=1).view(2 * rows, inputs)
