"""A Llama-shaped model with few launches: matrix products by torch, one fused kernel between them.

transformers' modules take about forty launches for a layer, this takes ten. Intermediate values have the dtype of the
weights, as in transformers.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

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
        torch.mm(self._final(rows, places), self._head.t(), out=out)

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
        inputs = [torch.zeros(tokens, dtype=torch.int64, device=self._embedding.device) for _ in range(3)]
        rows = self._rows(*inputs)
        rows.attended.zero_()
        return rows

    def begin(self, rows: StepRows) -> None:
        """Embed the tokens, and compute Q, K and V of the first layer."""
        torch.index_select(self._embedding, 0, rows.token_ids, out=rows.residual)
        normed = add_and_norm(rows.residual, None, self._layers[0].attention_norm, self._epsilon)
        self._project(0, normed, rows)

    def attend(self, number: int, rows: StepRows, batch: PagedBatch) -> None:
        """Attend with the queries of a layer. Rows behind the batch's tokens are unchanged."""
        self._backend.attend_into(number, rows.query, rows.attended, batch, self._layers[number].scoring)

    def follow(self, number: int, rows: StepRows) -> None:
        """Compute a layer from its attention on, and Q, K and V of the next layer."""
        computed = linear(self._gated(number, rows), self._layers[number].down)
        following = self._layers[number + 1]
        self._project(number + 1, add_and_norm(rows.residual, computed, following.attention_norm, self._epsilon), rows)

    def end(self, rows: StepRows) -> None:
        """Compute the last layer from its attention on, into `rows.computed`."""
        last = len(self._layers) - 1
        torch.mm(self._gated(last, rows), self._layers[last].down.t(), out=rows.computed)

    def head(self, rows: StepRows, places: torch.Tensor) -> torch.Tensor:
        """Return `[places, vocabulary]` logits of the rows at these indices."""
        return linear(self._final(rows, places), self._head)

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

    def _final(self, rows: StepRows, places: torch.Tensor) -> torch.Tensor:
        """Return `[places, hidden]`: what the head multiplies."""
        last, computed = (one.index_select(0, places) for one in (rows.residual, rows.computed))
        return add_and_norm(last, computed, self._final_norm, self._epsilon)

    def _rows(self, token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> StepRows:
        residual, computed = (self._embedding.new_empty(len(token_ids), self._embedding.shape[1]) for _ in range(2))
        query, attended = (residual.new_empty(len(token_ids), self._heads, self._size) for _ in range(2))
        return StepRows(token_ids, positions, slots, residual, query, attended, computed)

    def _project(self, number: int, normed: torch.Tensor, rows: StepRows) -> None:
        """Compute Q of a layer, and write its K and V into the cache."""
        layer = self._layers[number]
        projected = linear(normed, layer.projections, layer.biases)
        self._backend.write_rotated(
            number, projected, rows.positions, self._rotations, rows.query, rows.slots, layer.head_norms
        )

    def _gated(self, number: int, rows: StepRows) -> torch.Tensor:
        """Compute a layer from its attention to its gates; return `[tokens, inner]`, which `down` multiplies."""
        layer = self._layers[number]
        attended = linear(rows.attended.flatten(1), layer.output)
        normed = add_and_norm(rows.residual, attended, layer.mlp_norm, self._epsilon)
        return silu_gated(linear(normed, layer.gates))


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
