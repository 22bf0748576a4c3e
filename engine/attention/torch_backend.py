"""The reference backend: paged attention in plain torch, for any device, written for readability.

It gathers each sequence's blocks into contiguous K and V and attends to them, following equations 1 to 4 of
PagedAttention (Kwon et al., SOSP 2023). Faster backends read the blocks in place; tests compare all of them with the
same definition.
"""

from collections.abc import Sequence

import torch

from blocks import Copy
from engine.attention.backend import PagedBatch, Rows, Scoring
from engine.attention.codes import decode, encode, packed, unpacked
from engine.attention.tensor_backend import TensorBackend
from engine.attention.upload import upload


class TorchBackend(TensorBackend):
    """Paged attention by gather and softmax. Inside a (block, layer), K and V are slot-major."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
        """Scatter K and V to the batch's slots."""
        blocks, offsets = batch.slots // self.block_size, batch.slots % self.block_size
        if self.cache.dtype == torch.int8:
            key, value = packed(encode(key)), packed(encode(value))
        self.keys(layer)[blocks, offsets] = key
        self.values(layer)[blocks, offsets] = value

    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        """Attend for each group of rows; each query token belongs to exactly one."""
        output = query.new_empty(*query.shape[:2], self.geometry.layers[layer].value_size)
        for rows in batch.rows:
            output[rows.tokens] = self._attend_rows(layer, query[rows.tokens], rows, scoring)
        return output

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy all pairs by one kernel on a GPU, else block by block: torch's CPU indexing copies single elements."""
        if not (copies and self.cache.is_cuda):
            super().copy_blocks(copies)
            return
        sources, destinations = (upload(list(ids), torch.int64, self.cache.device) for ids in zip(*copies, strict=True))
        self.cache[destinations] = self.cache[sources]

    def _attend_rows(self, layer: int, query: torch.Tensor, rows: Rows, scoring: Scoring) -> torch.Tensor:
        key, value = self._gather(layer, rows)
        count, fed, heads, size = query.shape
        kv_heads = key.shape[1]
        # The query heads of one KV head become rows of one matrix: [rows, kv_heads, group * fed, head_size].
        rows_of_heads = query.view(count, fed, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
        rows_of_heads = rows_of_heads.reshape(count, kv_heads, -1, size)
        visible = _visible(rows, fed, key.shape[2], scoring.window)
        mask = (
            visible[:, None, None]
            .expand(count, 1, heads // kv_heads, *visible.shape[1:])
            .reshape(count, 1, -1, visible.shape[-1])
        )
        attended = _attention(
            rows_of_heads.to(key.dtype), key, value, mask, scoring, _sinks_of_rows(scoring, kv_heads, fed)
        )
        attended = attended.to(query.dtype).view(count, kv_heads, heads // kv_heads, fed, -1)
        return attended.permute(0, 3, 1, 2, 4).reshape(count, fed, heads, -1)

    def _gather(self, layer: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as `[rows, kv_heads, slots, head_size]`; slots beyond a sequence's end are zero.

        So are those of blocks that have left a window. Codes are decoded to float32. A weight of zero times an infinity
        left by an earlier sequence would be NaN, so stale slots must not be read.
        """
        slots = torch.arange(rows.tables.shape[1] * self.block_size, device=rows.tables.device)
        absent = (rows.tables == 0).repeat_interleave(self.block_size, 1)
        beyond = ((slots >= rows.ends[:, None]) | absent)[:, None, :, None]
        key, value = (
            self._decoded(part[rows.tables]).flatten(1, 2).transpose(1, 2).masked_fill(beyond, 0)
            for part in (self.keys(layer), self.values(layer))
        )
        return key, value

    def _decoded(self, pages: torch.Tensor) -> torch.Tensor:
        return decode(unpacked(pages)) if pages.dtype == torch.int8 else pages


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scoring: Scoring,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return softmax(q.k) v where the mask allows. Torch's operator supports neither softcap nor sinks.

    A row's sink is one more score, whose value is zero. `sinks`: `[kv_heads, group * fed, 1]` float32.
    """
    if scoring.softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scoring.scaling)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scoring.scaling
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.expand(len(scores), -1, -1, -1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return torch.matmul(weights, value.float()).to(value.dtype)


def _sinks_of_rows(scoring: Scoring, kv_heads: int, fed: int) -> torch.Tensor | None:
    """Return the sink of each query row of a KV head, `[kv_heads, group * fed, 1]`; None without sinks."""
    if scoring.sinks is None:
        return None
    return scoring.sinks.float().view(kv_heads, -1, 1).repeat_interleave(fed, 1)


def _visible(rows: Rows, fed: int, slots: int, window: int | None) -> torch.Tensor:
    """Return `[rows, fed, slots]`: the slots visible to each fed token, itself and earlier ones."""
    device = rows.ends.device
    positions = rows.ends[:, None] - fed + torch.arange(fed, device=device)
    distance = positions[:, :, None] - torch.arange(slots, device=device)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return visible
