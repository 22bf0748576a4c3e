"""A Llama-shaped model with few launches: matrix products by torch, one fused kernel between them.

transformers' modules take about forty launches for a layer, this takes ten. Intermediate values have the dtype of the
weights, as in transformers.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import embedding, linear

from engine.attention.backend import PagedBatch, Scoring
from engine.attention.llama_shape import head_size, rotations, window_of
from engine.attention.upload import IntegerType
from engine.gpu.triton_backend import TritonBackend
from engine.triton_kernels.gated import silu_gated
from engine.triton_kernels.norm import add_and_norm
from engine.triton_kernels.rotary_write import HeadNorms


@dataclass(frozen=True)
class _Layer:
    """The weights of one layer, with its projections in one matrix, and its gates in another."""

    attention_norm: torch.Tensor
    projections: torch.Tensor
    biases: torch.Tensor | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gates: torch.Tensor
    down: torch.Tensor
    scoring: Scoring
    head_norms: HeadNorms | None


class LlamaDecoder:
    """Runs the steps of one model over the cache of one backend."""

    integers: IntegerType = np.int64

    def __init__(self, model: Any, backend: TritonBackend, context_tokens: int) -> None:
        """Take over a model's weights: its modules share the fused tensors. Positions are below `context_tokens`."""
        self._backend = backend
        config = model.config
        self._heads, self._size = config.num_attention_heads, head_size(config)
        self._epsilon: float = config.rms_norm_eps
        self._embedding = model.model.embed_tokens.weight
        self._head = model.lm_head.weight
        self._final_norm = model.model.norm.weight
        self._rotations = torch.cat(rotations(model, context_tokens), dim=1).contiguous()
        self._layers = [_layer_weights(layer) for layer in model.model.layers]

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Run all layers, and the head at `places`."""
        residual = embedding(token_ids, self._embedding)
        normed = add_and_norm(residual, None, self._layers[0].attention_norm, self._epsilon)
        for number, layer in enumerate(self._layers):
            attended = self._attend(number, layer, normed, positions, batch)
            normed = add_and_norm(residual, linear(attended, layer.output), layer.mlp_norm, self._epsilon)
            computed = linear(silu_gated(linear(normed, layer.gates)), layer.down)
            if number + 1 < len(self._layers):
                following = self._layers[number + 1].attention_norm
                normed = add_and_norm(residual, computed, following, self._epsilon)
        last = residual.index_select(0, places)
        final = add_and_norm(last, computed.index_select(0, places), self._final_norm, self._epsilon)
        return linear(final, self._head)

    def _attend(
        self, number: int, layer: _Layer, normed: torch.Tensor, positions: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        projected = linear(normed, layer.projections, layer.biases)
        query = torch.empty(len(normed), self._heads, self._size, dtype=normed.dtype, device=normed.device)
        self._backend.write_rotated(number, projected, positions, self._rotations, query, batch, layer.head_norms)
        return self._backend.attend(number, query, batch, layer.scoring).view(len(normed), -1)


def _layer_weights(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = None if projections[0].bias is None else torch.cat([one.bias.detach() for one in projections])
    return _Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        projections=_fused(projections),
        biases=biases,
        output=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gates=_fused((mlp.gate_proj, mlp.up_proj)),
        down=mlp.down_proj.weight.detach(),
        scoring=Scoring(attention.scaling, window_of(attention)),
        head_norms=_head_norms(attention),
    )


def _head_norms(attention: Any) -> HeadNorms | None:
    if not hasattr(attention, "q_norm"):
        return None
    return HeadNorms(
        attention.q_norm.weight.detach(), attention.k_norm.weight.detach(), attention.q_norm.variance_epsilon
    )


def _fused(modules: tuple[Any, ...]) -> torch.Tensor:
    """Return the modules' weights as one matrix, and make theirs views of it to save memory.

    Without a copy if they were loaded side by side, see engine.model.weights.
    """
    weights: list[torch.Tensor] = [one.weight.detach() for one in modules]
    if _side_by_side(weights):
        rows = sum(map(len, weights))
        return weights[0].as_strided((rows, weights[0].shape[1]), weights[0].stride())
    fused = torch.cat(weights)
    parts = torch.split(fused, [len(one) for one in weights])
    for one, part in zip(modules, parts, strict=True):
        one.weight.data = part
    return fused


def _side_by_side(weights: list[torch.Tensor]) -> bool:
    """Return whether each matrix begins in memory where the one before ends."""
    return all(one.is_contiguous() for one in weights) and all(
        before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.data_ptr() + before.nbytes == after.data_ptr()
        for before, after in pairwise(weights)
    )
