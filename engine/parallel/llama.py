"""A rank's slice of a Llama-shaped model: its own attention heads, and its part of the MLP and of the vocabulary.

The first matrix of each pair is split by columns and the second by rows, so that a layer needs two sums over all ranks:
after the attention and after the MLP (Shoeybi et al., Megatron-LM, 2019). Attention reads and writes only this rank's
KV heads, which are the heads of its cache.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import linear, silu

from engine.attention.backend import AttentionBackend, PagedBatch, Scoring
from engine.attention.llama_shape import LlamaShape
from engine.attention.upload import IntegerType
from engine.native.llama_weights import EMBEDDING, HEAD
from engine.parallel.ranks import Ranks
from engine.parallel.shard import Shard
from engine.parallel.sliced_weights import ALL, SlicedWeights


@dataclass(frozen=True)
class _Layer:
    """A rank's weights of one layer. `projections`: its heads of q, then of k, then of v."""

    attention_norm: torch.Tensor
    projections: torch.Tensor
    biases: torch.Tensor | None
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gates: torch.Tensor
    down: torch.Tensor
    scoring: Scoring


class ParallelLlama:
    """Runs this rank's slice of every layer over its slice of the cache."""

    integers: IntegerType = np.int64

    def __init__(
        self,
        shape: LlamaShape,
        weights: SlicedWeights,
        backend: AttentionBackend,
        ranks: Ranks,
        context_tokens: int,
    ) -> None:
        """Read this rank's slices of the weights of a model of this shape. Positions are below `context_tokens`.

        Raises ModelUnsupported if a tensor is missing.
        """
        self._shape = shape
        self._backend = backend
        self._ranks = ranks
        self._shard = shard = Shard(ranks.rank, ranks.size)
        self._local = shard.local_shape(shape)
        self._rows = shard.part(shape.vocabulary)
        self._embedding = weights.tensor(EMBEDDING, self._rows)
        head = weights.optional(HEAD, self._rows)
        self._head = self._embedding if head is None else head  # tied
        self._final_norm = weights.tensor("model.norm.weight")
        self._layers = [self._layer(number, weights) for number in range(shape.layers)]
        weights.finish()
        device = self._embedding.device
        self._cosine, self._sine = (one.to(device) for one in shape.rotations(context_tokens))

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits at rank 0; at the other ranks only their part of the vocabulary."""
        hidden = self._embed(token_ids)
        rotation = self._cosine[positions][:, None], self._sine[positions][:, None]
        for number, layer in enumerate(self._layers):
            hidden = hidden + self._attend(number, layer, self._norm(hidden, layer.attention_norm), rotation, batch)
            hidden = hidden + self._multiply(layer, self._norm(hidden, layer.mlp_norm))
        scores = linear(self._norm(hidden[places], self._final_norm), self._head)
        return self._gather(scores)

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, hidden]` embeddings: each rank has those of its part of the vocabulary."""
        local = token_ids - self._rows.start
        ours = (local >= 0) & (local < self._rows.stop - self._rows.start)
        if not len(self._embedding):  # more ranks than parts
            rows = self._embedding.new_zeros(len(token_ids), self._shape.hidden)
        else:
            rows = self._embedding[local.where(ours, 0)] * ours[:, None]
        return self._sum(rows)

    def _attend(
        self,
        number: int,
        layer: _Layer,
        normed: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: PagedBatch,
    ) -> torch.Tensor:
        local = self._local
        heads = linear(normed, layer.projections, layer.biases).view(len(normed), -1, local.head_size)
        query, key, value = torch.split(heads, [local.heads, local.kv_heads, local.kv_heads], dim=1)
        if layer.head_norms:
            query, key = self._norm(query, layer.head_norms[0]), self._norm(key, layer.head_norms[1])
        self._backend.write(number, _rotated(key, *rotation), value, batch)
        attended = self._backend.attend(number, _rotated(query, *rotation), batch, layer.scoring)
        return self._sum(linear(attended.reshape(len(normed), -1), layer.output))

    def _multiply(self, layer: _Layer, normed: torch.Tensor) -> torch.Tensor:
        gate, gated = linear(normed, layer.gates).chunk(2, dim=1)
        return self._sum(linear(silu(gate) * gated, layer.down))

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; in float32, because partial sums would be rounded once for each rank."""
        return self._ranks.all_reduce(part.float()).to(part.dtype)

    def _gather(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits of all ranks side by side. All but the last parts are equal; the last is padded."""
        each = self._shard.each(self._shape.vocabulary)
        padded = torch.nn.functional.pad(scores.float(), (0, each - scores.shape[1]))
        return self._ranks.gather(padded)[:, : self._shape.vocabulary]

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Divide by the root of the mean square, as transformers does: in float32, then rounded, then weighted."""
        wide = values.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._shape.epsilon)).to(
            values.dtype
        )

    def _layer(self, number: int, weights: SlicedWeights) -> _Layer:
        shape, shard = self._shape, self._shard
        layer, attention = f"model.layers.{number}", f"model.layers.{number}.self_attn"
        counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
        rows = {name: _elements(shard.heads(count), shape.head_size) for name, count in counts.items()}
        inner = shard.part(shape.intermediate)
        biases = [(f"{attention}.{name}_proj.bias", part) for name, part in rows.items()]
        norms = [weights.optional(f"{attention}.{name}_norm.weight") for name in "qk"]
        return _Layer(
            attention_norm=weights.tensor(f"{layer}.input_layernorm.weight"),
            projections=weights.together([(f"{attention}.{name}_proj.weight", part) for name, part in rows.items()]),
            biases=weights.together(biases) if weights.has(biases[0][0]) else None,
            head_norms=(norms[0], norms[1]) if norms[0] is not None and norms[1] is not None else None,
            output=weights.tensor(f"{attention}.o_proj.weight", ALL, rows["q"]),
            mlp_norm=weights.tensor(f"{layer}.post_attention_layernorm.weight"),
            gates=weights.together([(f"{layer}.mlp.{name}_proj.weight", inner) for name in ("gate", "up")]),
            down=weights.tensor(f"{layer}.mlp.down_proj.weight", ALL, inner),
            scoring=Scoring(shape.scaling, shape.windows[number] or None),
        )


def _elements(heads: slice, size: int) -> slice:
    return slice(heads.start * size, heads.stop * size)


def _rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the elements i and i + size / 2 of each head of `[tokens, heads, size]` (RoPE, Su et al. 2021)."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(heads.dtype)
