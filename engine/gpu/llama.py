"""A Llama-shaped model with few launches: matrix products by torch, one fused kernel between them.

transformers' modules take about forty launches for a layer, this takes nine. Intermediate values have the dtype of the
weights, as in transformers.
"""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch.nn.functional import linear

from engine.attention.backend import PagedBatch
from engine.attention.upload import IntegerType
from engine.gpu.llama_weights import DecoderWeights
from engine.gpu.triton_backend import TritonBackend
from engine.triton_kernels.gated import silu_gated
from engine.triton_kernels.norm import add_and_norm
from engine.triton_kernels.rotary_write import HeadNorms


@dataclass(frozen=True)
class StepRows:
    """What the parts of a step read and write besides weights and cache: a row for each token.

    `token_ids`, `positions` and `slots`: `[tokens]` int64. `residual`: `[tokens, hidden]`; `query` and `attended`:
    `[tokens, heads, head_size]`; `computed`: `[tokens, hidden]`, to be added to the residual at the end. These four are
    contiguous and of the weights' dtype.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    residual: torch.Tensor
    query: torch.Tensor
    attended: torch.Tensor
    computed: torch.Tensor

    def up_to(self, count: int) -> "StepRows":
        """Return the first `count` rows, in the same memory."""
        return StepRows(*(getattr(self, field.name)[:count] for field in fields(self)))


class LlamaDecoder:
    """Runs the steps of one model over the cache of one backend.

    A step is `begin`; then for each layer `attend`, followed by `follow`, or `end` behind the last layer; then `head`.
    Only `attend` depends on the lengths of sequences, only `head` on the number of logits: the launches of the other
    parts depend on the number of rows alone.
    """

    integers: IntegerType = np.int64

    def __init__(self, weights: DecoderWeights, backend: TritonBackend) -> None:
        """Multiply by these weights, which stay where they are."""
        self._backend = backend
        self._weights = weights
        self._layers = weights.layers
        self._head_norms = [
            None if one.head_norms is None else HeadNorms(*one.head_norms, weights.epsilon) for one in weights.layers
        ]

    @classmethod
    def of_model(cls, model: Any, backend: TritonBackend, context_tokens: int) -> Self:
        """Take over a model's weights: its modules share the fused tensors. Positions are below `context_tokens`."""
        return cls(DecoderWeights.of(model, context_tokens), backend)

    def logits(
        self, token_ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, batch: PagedBatch
    ) -> torch.Tensor:
        """Run all layers, and the head at `places`."""
        return self.head(self._run(token_ids, positions, batch), places)

    def logits_into(
        self,
        out: torch.Tensor,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        places: torch.Tensor,
        batch: PagedBatch,
    ) -> None:
        """Run all layers, and write the head's product at `places` into `out`, without a copy."""
        rows = self._run(token_ids, positions, batch)
        torch.mm(self.final(rows, places), self._weights.head.t(), out=out)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    @property
    def matrix_elements(self) -> int:
        """Number of elements of all layers' matrices, by which a token is multiplied."""
        matrices = (matrix for one in self._layers for matrix in (one.projections, one.output, one.gates, one.down))
        return sum(matrix.numel() for matrix in matrices)

    def empty_rows(self, tokens: int) -> StepRows:
        """Allocate the rows of a step, with token 0 at position 0 of block 0 in each."""
        device = self._weights.final_norm.device
        inputs = [torch.zeros(tokens, dtype=torch.int64, device=device) for _ in range(3)]
        rows = self._rows(*inputs)
        rows.attended.zero_()
        return rows

    def begin(self, rows: StepRows) -> None:
        """Embed the tokens, and compute Q, K and V of the first layer."""
        self.embed(rows)
        self._project(0, self._normed(rows, None, self._layers[0].attention_norm), rows)

    def attend(self, number: int, rows: StepRows, batch: PagedBatch) -> None:
        """Attend with the queries of a layer. Rows behind the batch's tokens are unchanged."""
        self._backend.attend_into(number, rows.query, rows.attended, batch, self._layers[number].scoring)

    def follow(self, number: int, rows: StepRows) -> None:
        """Compute a layer from its attention on, and Q, K and V of the next layer."""
        product = linear(self._gated(number, rows), self._layers[number].down)
        self._project(number + 1, self._normed(rows, product, self._layers[number + 1].attention_norm), rows)

    def end(self, rows: StepRows) -> None:
        """Compute the last layer from its attention on, into `rows.computed`."""
        last = len(self._layers) - 1
        torch.mm(self._gated(last, rows), self._layers[last].down.t(), out=rows.computed)

    def head(self, rows: StepRows, places: torch.Tensor) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of the rows at these indices."""
        return linear(self.final(rows, places), self._weights.head)

    def final(self, rows: StepRows, places: torch.Tensor) -> torch.Tensor:
        """Return `[places, hidden]`: what the head multiplies."""
        last, product = (one.index_select(0, places) for one in (rows.residual, rows.computed))
        return add_and_norm(last, self.summed(product), self._weights.final_norm, self._weights.epsilon)

    def embed(self, rows: StepRows) -> None:
        """Write the embeddings of the tokens into `rows.residual`."""
        torch.index_select(self._weights.embedding, 0, rows.token_ids, out=rows.residual)

    def summed(self, product: torch.Tensor) -> torch.Tensor:
        """Return what is added to the residual for a layer's product `[rows, hidden]`: it, or parts of the sum."""
        return product

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, batch: PagedBatch) -> StepRows:
        """Run all layers on new rows."""
        rows = self._rows(token_ids, positions, batch.slots)
        self.begin(rows)
        for layer in range(self.layers - 1):
            self.attend(layer, rows, batch)
            self.follow(layer, rows)
        self.attend(self.layers - 1, rows, batch)
        self.end(rows)
        return rows

    def _rows(self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> StepRows:
        norm, heads = self._weights.final_norm, (self._weights.heads, self._weights.head_size)
        residual, computed = (norm.new_empty(len(token_ids), len(norm)) for _ in range(2))
        query, attended = (norm.new_empty(len(token_ids), *heads) for _ in range(2))
        return StepRows(token_ids, positions, slots, residual, query, attended, computed)

    def _normed(self, rows: StepRows, product: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Add a product, if given, to the residual; return its norm, which the next product reads."""
        added = None if product is None else self.summed(product)
        return add_and_norm(rows.residual, added, weight, self._weights.epsilon)

    def _project(self, number: int, normed: torch.Tensor, rows: StepRows) -> None:
        """Compute Q of a layer, and write its K and V into the cache."""
        layer = self._layers[number]
        projected = linear(normed, layer.projections, layer.biases)
        self._backend.write_rotated(
            number, projected, rows.positions, self._weights.rotations, rows.query, rows.slots, self._head_norms[number]
        )

    def _gated(self, number: int, rows: StepRows) -> torch.Tensor:
        """Compute a layer from its attention to its gates; return `[tokens, inner]`, which `down` multiplies."""
        layer = self._layers[number]
        normed = self._normed(rows, linear(rows.attended.flatten(1), layer.output), layer.mlp_norm)
        return silu_gated(linear(normed, layer.gates))
