"""Runs a rank's slice of a Llama-shaped model with torch's operators, for CPUs and backends without fused kernels."""

import numpy as np
import torch
from torch.nn.functional import linear, silu

from engine.attention.backend import AttentionBackend, PagedBatch
from engine.attention.upload import IntegerType
from engine.gpu.llama_weights import LayerWeights
from engine.parallel.llama_slice import LlamaSlice


class ParallelLlama:
    """Runs this rank's slice of every layer over its slice of the cache."""

    integers: IntegerType = np.int64

    def __init__(self, own: LlamaSlice, backend: AttentionBackend) -> None:
        """Multiply by the weights of this rank's slice."""
        self._slice = own
        self._weights = own.weights
        self._backend = backend
        self._ranks = own.ranks
        self._cosine, self._sine = own.weights.rotations.chunk(2, dim=1)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Return `[places, vocabulary]` logits at rank 0; at the other ranks only their part of the vocabulary."""
        hidden = self._embed(token_ids)
        rotation = self._cosine[positions][:, None], self._sine[positions][:, None]
        for number, layer in enumerate(self._weights.layers):
            hidden = hidden + self._attend(number, layer, self._norm(hidden, layer.attention_norm), rotation, batch)
            hidden = hidden + self._multiply(layer, self._norm(hidden, layer.mlp_norm))
        return self._slice.logits(self._norm(hidden[places], self._weights.final_norm))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return `[tokens, hidden]` embeddings: each rank has those of its part of the vocabulary."""
        own, embedding = self._slice.tokens, self._weights.embedding
        local = token_ids - own.start
        ours = (local >= 0) & (local < own.stop - own.start)
        if not len(embedding):  # more ranks than parts
            rows = embedding.new_zeros(len(token_ids), embedding.shape[1])
        else:
            rows = embedding[local.where(ours, 0)] * ours[:, None]
        return self._sum(rows)

    def _attend(
        self,
        number: int,
        layer: LayerWeights,
        normed: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: PagedBatch,
    ) -> torch.Tensor:
        local = self._slice.shape
        heads = linear(normed, layer.projections, layer.biases).view(len(normed), -1, local.head_size)
        query, key, value = torch.split(heads, [local.heads, local.kv_heads, local.kv_heads], dim=1)
        if layer.head_norms:
            query, key = self._norm(query, layer.head_norms[0]), self._norm(key, layer.head_norms[1])
        self._backend.write(number, _rotated(key, *rotation), value, batch)
        attended = self._backend.attend(number, _rotated(query, *rotation), batch, layer.scoring)
        return self._sum(linear(attended.reshape(len(normed), -1), layer.output))

    def _multiply(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        gate, gated = linear(normed, layer.gates).chunk(2, dim=1)
        return self._sum(linear(silu(gate) * gated, layer.down))

    def _sum(self, part: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks; in float32, because partial sums would be rounded once for each rank."""
        return self._ranks.all_reduce(part.float()).to(part.dtype)

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Divide by the root of the mean square, as transformers does: in float32, then rounded, then weighted."""
        wide = values.float()
        factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._weights.epsilon)
        return weight * (wide * factor).to(values.dtype)


def _rotated(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate the elements i and i + size / 2 of each head of `[tokens, heads, size]` (RoPE, Su et al. 2021)."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1).to(heads.dtype)
