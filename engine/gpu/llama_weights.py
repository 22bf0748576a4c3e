"""The weights of a Llama-shaped model, or of a rank's slice of one, in the form that decoders multiply by."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from engine.attention.backend import Scoring
from engine.attention.llama_shape import head_size, rotations, window_of


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer, with its projections in one matrix, and its gates in another.

    `head_norms`: `[head_size]` weights of the norms of each head of Q and of K, if the layer has them.
    """

    attention_norm: torch.Tensor
    projections: torch.Tensor
    biases: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gates: torch.Tensor
    down: torch.Tensor
    scoring: Scoring


@dataclass(frozen=True)
class DecoderWeights:
    """All weights of a decoder with `heads` query heads.

    `rotations`: `[positions, head_size]` float32, cosines and then sines of each position's angles.
    """

    heads: int
    head_size: int
    epsilon: float
    rotations: torch.Tensor
    embedding: torch.Tensor
    layers: Sequence[LayerWeights]
    final_norm: torch.Tensor
    head: torch.Tensor

    @classmethod
    def of(cls, model: Any, context_tokens: int) -> "DecoderWeights":
        """Take over a model's weights: its modules share the fused tensors. Positions are below `context_tokens`."""
        config = model.config
        return cls(
            heads=config.num_attention_heads,
            head_size=head_size(config),
            epsilon=config.rms_norm_eps,
            rotations=torch.cat(rotations(model, context_tokens), dim=1).contiguous(),
            embedding=model.model.embed_tokens.weight,
            layers=[_layer_weights(layer) for layer in model.model.layers],
            final_norm=model.model.norm.weight,
            head=model.lm_head.weight,
        )


def _layer_weights(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biases = None if projections[0].bias is None else torch.cat([one.bias.detach() for one in projections])
    norms = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach()) if _has_head_norms(attention) else None
    return LayerWeights(
        attention_norm=layer.input_layernorm.weight.detach(),
        projections=fused(projections),
        biases=biases,
        head_norms=norms,
        output=attention.o_proj.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gates=fused((mlp.gate_proj, mlp.up_proj)),
        down=mlp.down_proj.weight.detach(),
        scoring=Scoring(attention.scaling, window_of(attention)),
    )


def _has_head_norms(attention: Any) -> bool:
    return hasattr(attention, "q_norm")


def fused(modules: tuple[Any, ...]) -> torch.Tensor:
    """Return the modules' weights as one matrix, and make theirs views of it to save memory.

    Without a copy if they were loaded side by side, see engine.model.weights.
    """
    weights: list[torch.Tensor] = [one.weight.detach() for one in modules]
    if _side_by_side(weights):
        rows = sum(map(len, weights))
        return weights[0].as_strided((rows, weights[0].shape[1]), weights[0].stride())
    matrix = torch.cat(weights)
    parts = torch.split(matrix, [len(one) for one in weights])
    for one, part in zip(modules, parts, strict=True):
        one.weight.data = part
    return matrix


def _side_by_side(weights: list[torch.Tensor]) -> bool:
    """Return whether each matrix begins in memory where the one before ends."""
    return all(one.is_contiguous() for one in weights) and all(
        before.untyped_storage().data_ptr() == after.untyped_storage().data_ptr()
        and before.data_ptr() + before.nbytes == after.data_ptr()
        for before, after in pairwise(weights)
    )
