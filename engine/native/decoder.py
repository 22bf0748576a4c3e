"""A Llama-shaped model run entirely by the kernels: one call for a step, instead of hundreds of modules.

Uses the weights that transformers loaded. Activations are float32; weights, K and V are bfloat16.
"""

from ctypes import POINTER, cast
from typing import Any

import torch

from engine.attention.backend import PagedBatch
from engine.attention.llama_shape import head_size, is_llama_shaped, rotations, window_of
from engine.native.kernels import MAX_HEAD_SIZE, CacheView, Kernels, NativeLayer, NativeModel, packed_size

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

    def __init__(self, kernels: Kernels, model: Any, view: CacheView, context_tokens: int, threads: int) -> None:
        """Pack the weights of a Llama-shaped model. Positions are below `context_tokens`."""
        self._kernels = kernels
        self._view = view
        self._threads = threads
        self._kept: list[torch.Tensor] = []  # tensors that the structures point to
        self._room = torch.empty(0, dtype=torch.bfloat16)  # for the next packed weights
        self._model = self._native_model(model, context_tokens)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of a flattened batch, at these indices."""
        tokens = (token_ids.to(torch.int32), positions.to(torch.int32), places.to(torch.int32))
        return self._kernels.step(self._model, self._view, batch, tokens, self._threads)

    def _native_model(self, model: Any, context_tokens: int) -> NativeModel:
        config, layers = model.config, model.model.layers
        size = head_size(config)
        described = NativeModel(
            layers=len(layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=size,
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            epsilon=config.rms_norm_eps,
            scaling=layers[0].self_attn.scaling,
        )
        self._layers = (NativeLayer * len(layers))(*map(self._layer, layers))
        described.layer = cast(self._layers, POINTER(NativeLayer))
        described.embedding = self._keep(model.model.embed_tokens.weight.detach().to(torch.bfloat16).contiguous())
        described.head = self._pack(model.lm_head.weight)
        described.final_norm = self._float(model.model.norm.weight)
        described.cosine, described.sine = map(self._float, rotations(model, context_tokens))
        return described

    def _layer(self, layer: Any) -> NativeLayer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        described = NativeLayer(window=window_of(attention) or 0)
        described.projections = self._pack(torch.cat([one.weight for one in projections]))
        described.output = self._pack(attention.o_proj.weight)
        described.gates = self._pack(_alternating(mlp.gate_proj.weight, mlp.up_proj.weight))
        described.down = self._pack(mlp.down_proj.weight)
        described.attention_norm = self._float(layer.input_layernorm.weight)
        described.mlp_norm = self._float(layer.post_attention_layernorm.weight)
        if projections[0].bias is not None:
            described.projection_bias = self._float(torch.cat([one.bias for one in projections]))
        if hasattr(attention, "q_norm"):
            described.query_norm = self._float(attention.q_norm.weight)
            described.key_norm = self._float(attention.k_norm.weight)
        return described

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
