"""A rank's slice of a Llama-shaped model: its own attention heads, and its part of the MLP and of the vocabulary.

The first matrix of each pair is split by columns and the second by rows, so that a layer needs two sums over all ranks:
after the attention and after the MLP (Shoeybi et al., Megatron-LM, 2019). Attention reads and writes only this rank's
KV heads, which are the heads of its cache.
"""

from dataclasses import dataclass

import torch

from engine.attention.backend import Scoring
from engine.attention.llama_shape import LlamaShape
from engine.gpu.llama_weights import DecoderWeights, LayerWeights
from engine.native.llama_weights import EMBEDDING, HEAD
from engine.parallel.ranks import Ranks
from engine.parallel.shard import Shard
from engine.parallel.sliced_weights import ALL, SlicedWeights


@dataclass(frozen=True)
class LlamaSlice:
    """The slice of one of `ranks`. `shape` has its numbers of heads; its embedding and head have the `tokens`."""

    ranks: Ranks
    shape: LlamaShape
    tokens: slice
    weights: DecoderWeights

    @classmethod
    def read(cls, shape: LlamaShape, files: SlicedWeights, ranks: Ranks, context_tokens: int) -> "LlamaSlice":
        """Read this rank's slices of the weights of a model of this shape. Positions are below `context_tokens`.

        Raises ModelUnsupported if a tensor is missing.
        """
        shard = Shard(ranks.rank, ranks.size)
        tokens = shard.part(shape.vocabulary)
        embedding = files.tensor(EMBEDDING, tokens)
        head = files.optional(HEAD, tokens)
        weights = DecoderWeights(
            heads=shard.local_shape(shape).heads,
            head_size=shape.head_size,
            epsilon=shape.epsilon,
            rotations=torch.cat(shape.rotations(context_tokens), dim=1).to(embedding.device),
            embedding=embedding,
            layers=[_layer(number, shape, shard, files) for number in range(shape.layers)],
            final_norm=files.tensor("model.norm.weight"),
            head=embedding if head is None else head,  # tied
        )
        files.finish()
        return cls(ranks, shard.local_shape(shape), tokens, weights)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply `[rows, hidden]` by the head: `[rows, vocabulary]` logits of all ranks at rank 0, if given in `out`.

        Another rank returns its own part, with rows as long as those of rank 0's part: only the last is shorter.
        """
        head, all_tokens = self.weights.head, self.shape.vocabulary
        each = Shard(self.ranks.rank, self.ranks.size).each(all_tokens)
        mine = hidden.new_empty(len(hidden), each) if out is None or self.ranks.rank == 0 else out
        torch.mm(hidden, head.t(), out=mine[:, : len(head)])
        parts = self.ranks.gather(mine)
        if self.ranks.rank:
            return mine
        ends = [min(each, max(0, all_tokens - each * number)) for number in range(len(parts))]
        return torch.cat([part[:, :end] for part, end in zip(parts, ends, strict=True)], dim=1, out=out)


def _layer(number: int, shape: LlamaShape, shard: Shard, files: SlicedWeights) -> LayerWeights:
    layer, attention = f"model.layers.{number}", f"model.layers.{number}.self_attn"
    counts = {"q": shape.heads, "k": shape.kv_heads, "v": shape.kv_heads}
    rows = {name: _elements(shard.heads(count), shape.head_size) for name, count in counts.items()}
    inner = shard.part(shape.intermediate)
    biases = [(f"{attention}.{name}_proj.bias", part) for name, part in rows.items()]
    norms = [files.optional(f"{attention}.{name}_norm.weight") for name in "qk"]
    return LayerWeights(
        attention_norm=files.tensor(f"{layer}.input_layernorm.weight"),
        projections=files.together([(f"{attention}.{name}_proj.weight", part) for name, part in rows.items()]),
        biases=files.together(biases) if files.has(biases[0][0]) else None,
        head_norms=(norms[0], norms[1]) if norms[0] is not None and norms[1] is not None else None,
        output=files.tensor(f"{attention}.o_proj.weight", ALL, rows["q"]),
        mlp_norm=files.tensor(f"{layer}.post_attention_layernorm.weight"),
        gates=files.together([(f"{layer}.mlp.{name}_proj.weight", inner) for name in ("gate", "up")]),
        down=files.tensor(f"{layer}.mlp.down_proj.weight", ALL, inner),
        scoring=Scoring(shape.scaling, shape.windows[number] or None),
    )


def _elements(heads: slice, size: int) -> slice:
    return slice(heads.start * size, heads.stop * size)
