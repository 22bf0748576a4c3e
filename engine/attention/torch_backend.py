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
        self.cache[blocks, layer, 0, offsets] = key
        self.cache[blocks, layer, 1, offsets] = value

    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        """Attend for each group of rows; each query token belongs to exactly one."""
        output = torch.empty_like(query)
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
        kv_heads = self.geometry.kv_heads
        # The query heads of one KV head become rows of one matrix: [rows, kv_heads, group * fed, head_size].
        rows_of_heads = query.view(count, fed, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
        rows_of_heads = rows_of_heads.reshape(count, kv_heads, -1, size)
        visible = _visible(rows, fed, key.shape[2], scoring.window)
        mask = (
            visible[:, None, None]
            .expand(count, 1, heads // kv_heads, *visible.shape[1:])
            .reshape(count, 1, -1, visible.shape[-1])
        )
        attended = _attention(rows_of_heads.to(key.dtype), key, value, mask, scoring).to(query.dtype)
        attended = attended.view(count, kv_heads, heads // kv_heads, fed, size)
        return attended.permute(0, 3, 1, 2, 4).reshape(count, fed, heads, size)

    def _gather(self, layer: int, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V as `[rows, kv_heads, slots, head_size]`; slots beyond a sequence's end are zero.

        Codes are decoded to float32. A weight of zero times an infinity left by an earlier sequence would be NaN, so
        stale slots must not be read.
        """
        pages = self.cache[rows.tables, layer]
        if pages.dtype == torch.int8:
            pages = decode(unpacked(pages))
        slots = torch.arange(rows.tables.shape[1] * self.block_size, device=rows.tables.device)
        beyond = (slots >= rows.ends[:, None])[:, None, :, None]
        key, value = (part.flatten(1, 2).transpose(1, 2).masked_fill(beyond, 0) for part in pages.unbind(2))
        return key, value


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Return softmax(q.k) v where the mask allows. Torch's operator does not support softcap."""
    if scoring.softcap is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scoring.scaling)
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)) * scoring.scaling
    capped = torch.tanh(scores / scoring.softcap) * scoring.softcap
    weights = capped.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return torch.matmul(weights, value.float()).to(value.dtype)


def _visible(rows: Rows, fed: int, slots: int, window: int | None) -> torch.Tensor:
    """Return `[rows, fed, slots]`: the slots visible to each fed token, itself and earlier ones."""
    device = rows.ends.device
    positions = rows.ends[:, None] - fed + torch.arange(fed, device=device)
    distance = positions[:, :, None] - torch.arange(slots, device=device)
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return visible
