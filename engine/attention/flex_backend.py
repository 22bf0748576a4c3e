"""Paged attention by torch's FlexAttention, on CPUs and GPUs, without custom kernels.

FlexAttention (Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024)
compiles one kernel from a mask and a score modification written in Python. For paging, the pool is one long sequence of
K and V, the block table is the list of blocks that the kernel visits, and the mask maps pool slots back to positions
(Joshi et al., "Paged Attention Meets FlexAttention", 2025). See decision 19.
"""

from itertools import pairwise
from math import isqrt, lcm
from typing import NamedTuple

import torch

from engine.attention.backend import PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.attention.flex_graphs import (
    FlexLists,
    FlexMask,
    FlexScores,
    FlexShape,
    attend,
    check_graphs,
    compile_graphs,
    next_power,
    scores_of,
    uncompiled,
)
from engine.attention.flex_mask import QueryRows, block_lists, query_rows
from engine.attention.tensor_backend import TensorBackend

# Window of a layer without one: larger than any context.
_NO_WINDOW = 2**30
# Rows (tokens x query heads of one KV head) of a matrix product for one row of the batch. On a CPU with AMX, torch's
# kernel repacks its K and V, here the whole pool, from 64 rows of bfloat16 on.
_CPU_ROWS, _GPU_ROWS = 63, 64
# Minimum rows of a mask, because its shape is compiled in.
_ROOM = 256
# Maximum scores in memory when uncompiled.
_EAGER_SCORES = 2**21


class _Prepared(NamedTuple):
    rows: QueryRows
    mask: FlexMask
    lists: FlexLists


class FlexBackend(TensorBackend):
    """Paged attention by FlexAttention. Inside a (block, layer), K and V of a head and slot follow each other.

    So K and V of a layer are sequences with the same distance of slots, whatever their sizes.

    bfloat16 and float16 are slow on a CPU, because the generated kernels multiply them without packing. On a GPU one
    program for each KV head processes a sequence, whatever its length.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        block_size: int,
        device_blocks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        host_blocks: int = 0,
        *,
        compiled: bool = True,
    ) -> None:
        """Allocate the cache, and the host tier if it has blocks.

        Uncompiled, it gathers the K and V of a batch and materializes scores: for checking masks, not for serving.
        Raises BackendUnavailable if the kernels cannot be compiled, or not for this block size.
        """
        device = device or torch.device("cpu")
        if compiled:
            check_graphs(geometry, block_size, device_blocks, device)
        super().__init__(geometry, block_size, device_blocks, dtype, device, host_blocks)
        self._graphs = compile_graphs() if compiled else None
        self._batch: PagedBatch | None = None
        self._unused: tuple[torch.Tensor, torch.Tensor] | None = None
        self._prepared: dict[tuple[int, int, int, bool], tuple[_Prepared, ...]] = {}
        # Elsewhere sinks are added to the logarithms of sums, which torch 2.13's CPU kernels do not return.
        self._has_sink_slot = compiled and device.type == "cpu"

    def block_multiple(self) -> int:
        """Return what makes a block a whole number of blocks of each layer's sequence."""
        return lcm(*(self._layer_elements(layer) for layer in range(len(self.geometry.layers))))

    def keys(self, layer: int) -> torch.Tensor:
        """Return K of a layer in all blocks, `[blocks, slots, kv_heads, key_size]`, in the cache's memory."""
        return self._pages(layer)[..., : self.geometry.layers[layer].key_size]

    def values(self, layer: int) -> torch.Tensor:
        """Return V of a layer in the same way."""
        return self._pages(layer)[..., self.geometry.layers[layer].key_size :]

    def _pages(self, layer: int) -> torch.Tensor:
        begin, size = self.layout.parts[layer][0].offset, self._layer_elements(layer)
        pages = self.cache[:, begin : begin + size]
        return pages.view(len(pages), self.block_size, self.geometry.layers[layer].kv_heads, -1)

    def _layer_elements(self, layer: int) -> int:
        shape = self.geometry.layers[layer]
        return self.block_size * shape.kv_heads * (shape.key_size + shape.value_size)

    def _stride(self, layer: int) -> int:
        """Return the blocks of a layer's sequence for each block of the pool."""
        return self.layout.elements // self._layer_elements(layer)

    def _columns(self, stride: int) -> int:
        """Return how many blocks a layer's sequence has: `stride` for each block of the pool, one for the last."""
        return (len(self.cache) - 1) * stride + 1

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
        """Scatter K and V to the batch's slots; in a new block, zero the V of slots beyond the sequence's end.

        The kernel weighs masked slots with zero, and zero times a stale infinity would be NaN.
        """
        self._begin(batch)
        if self._unused is None:
            self._unused = _unused_slots(batch)
        blocks, offsets = self._unused
        if len(blocks):
            self.values(layer)[blocks, offsets] = 0.0
        blocks, offsets = batch.slots // self.block_size, batch.slots % self.block_size
        self.keys(layer)[blocks, offsets] = key.to(self.cache.dtype)
        self.values(layer)[blocks, offsets] = value.to(self.cache.dtype)

    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        """Attend with all decoding sequences at once, and with all rows of prompts at once."""
        self._begin(batch)
        shape = self.geometry.layers[layer]
        output = query.new_empty(*query.shape[:2], shape.value_size)
        group = query.shape[1] // shape.kv_heads
        sink_slot = self._has_sink_slot and scoring.sinks is not None
        if sink_slot:
            self.values(layer)[0] = 0.0  # block 0 is never allocated
        for prepared in self._prepare(batch, group, scoring.window, self._stride(layer), sink_slot=sink_slot):
            rows = prepared.rows
            packed = _pack(query, rows, shape.kv_heads).to(self.cache.dtype)
            attended = self._attend(layer, packed, prepared, scores_of(scoring, shape.kv_heads, query.device))
            # Back from [rows, kv_heads, length * group, value_size] to tokens.
            split = attended.reshape(len(attended), shape.kv_heads, -1, group, shape.value_size)
            tokens = split.permute(0, 2, 1, 3, 4).reshape(-1, *output.shape[1:])
            output[rows.fed] = tokens[rows.places].to(query.dtype)
        return output

    def _begin(self, batch: PagedBatch) -> None:
        """Discard what was prepared for another batch; all layers of a batch share it."""
        if self._batch is not batch:
            self._batch, self._unused = batch, None
            self._prepared.clear()

    def _prepare(
        self, batch: PagedBatch, group: int, window: int | None, stride: int, *, sink_slot: bool
    ) -> tuple[_Prepared, ...]:
        window = _NO_WINDOW if window is None else window
        key = (group, window, stride, sink_slot)
        if key not in self._prepared:
            rows = _CPU_ROWS if self.cache.device.type == "cpu" else _GPU_ROWS
            layouts = query_rows(batch, max(1, rows // group))
            self._prepared[key] = tuple(
                self._mask(batch, rows, window, stride, sink_slot=sink_slot) for rows in layouts
            )
        return self._prepared[key]

    def _mask(self, batch: PagedBatch, rows: QueryRows, window: int, stride: int, *, sink_slot: bool) -> _Prepared:
        tables = batch.tables[rows.sequences].to(torch.int64)
        width = tables.shape[1]
        blocks = block_lists(rows.first, rows.last, window, self.block_size, width, len(self.cache))
        mask = FlexMask(
            self._logical(tables, rows.last),
            _with_room(rows.first.to(torch.int32)),
            torch.tensor(window, dtype=torch.int32, device=tables.device),
        )
        partial = tables.gather(1, blocks.partial)
        if sink_slot:
            partial = torch.cat((partial.new_zeros(len(partial), 1), partial), 1)
        lists = FlexLists(
            _counts(blocks.partial_counts + sink_slot),
            self._indices(partial, stride),
            _counts(blocks.full_counts),
            self._indices(tables.gather(1, blocks.full), stride),
        )
        return _Prepared(rows, mask, lists)

    def _logical(self, tables: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        held = torch.arange(tables.shape[1], device=tables.device)
        known = tables.new_full((len(tables), len(self.cache)), -1, dtype=torch.int32)
        # Block 0 pads the tables and is never allocated.
        mine = tables.masked_fill(held > last[:, None] // self.block_size, 0)
        known.scatter_(1, mine, held.to(torch.int32).expand_as(tables))
        known[:, 0] = -1
        return _with_room(known)

    def _indices(self, blocks: torch.Tensor, stride: int) -> torch.Tensor:
        """Return blocks of the pool as blocks of the viewed sequence, `[rows, 1, 1, columns]`.

        FlexAttention requires as many columns as the sequence has blocks, dozens for each block of the pool. The kernel
        reads only as many as the counts say, so the rows overlap: each starts one pool of blocks after the one before.
        """
        rows, width = blocks.shape
        apart, columns = len(self.cache), self._columns(stride)
        buffer = torch.empty(rows * apart + columns, dtype=torch.int32, device=blocks.device)
        buffer[: rows * apart].view(rows, apart)[:, :width] = blocks * stride
        return buffer.as_strided((rows, 1, 1, columns), (apart, apart, apart, 1))

    def _attend(self, layer: int, packed: torch.Tensor, prepared: _Prepared, scores: FlexScores) -> torch.Tensor:
        length = packed.shape[2]
        group = length // prepared.rows.tokens.shape[1]
        if self._graphs is None:
            return self._attend_eagerly(layer, packed, prepared, scores)
        query_block = length if packed.device.type == "cpu" else max(16, next_power(length))
        sink_slot = self._has_sink_slot and scores[2] is not None
        shape = FlexShape(self.block_size, self._stride(layer), group, query_block, sink_slot)
        for tensor in (packed, *prepared.lists):
            torch._dynamo.mark_dynamic(tensor, 0)
        key, value = self._sequence(layer, self.keys(layer)), self._sequence(layer, self.values(layer))
        return self._graphs(packed, key, value, prepared.mask, prepared.lists, scores, shape)

    def _sequence(self, layer: int, part: torch.Tensor) -> torch.Tensor:
        """Return K or V of a layer as one sequence `[1, kv_heads, columns * block_size, head_size]`.

        Block b of the pool is its block b * stride; the blocks between belong to other layers.
        """
        _, slot, head, _ = part.stride()
        slots = self._columns(self._stride(layer)) * self.block_size
        sizes = (1, part.shape[2], slots, part.shape[3])
        return self.cache.as_strided(sizes, (slots * slot, head, slot, 1), part.storage_offset())

    def _attend_eagerly(
        self, layer: int, packed: torch.Tensor, prepared: _Prepared, scores: FlexScores
    ) -> torch.Tensor:
        """Attend to a copy of the visible blocks, a few rows at a time, to limit the memory of scores."""
        count, heads, length, _ = packed.shape
        shape = FlexShape(self.block_size, 1, length // prepared.rows.tokens.shape[1], length)
        logical = prepared.mask.logical[:count]
        seen = int((logical >= 0).sum(1).max()) * self.block_size
        # Each row of a part is scored against the blocks of all its rows.
        few = max(1, isqrt(_EAGER_SCORES // max(1, heads * length * seen)))
        attended = []
        for some in torch.split(torch.arange(count, device=packed.device), few):
            used = (logical[some] >= 0).any(0).nonzero()[:, 0]
            # Padding rows see no block, and operators do not accept an empty sequence.
            used = used if len(used) else used.new_zeros(1)
            key, value = (
                part[used].flatten(0, 1).transpose(0, 1)[None].float()
                for part in (self.keys(layer), self.values(layer))
            )
            mask = FlexMask(logical[some][:, used], prepared.mask.first[some], prepared.mask.window)
            nothing = torch.zeros((len(some), 1, 1), dtype=torch.int32, device=packed.device)
            indices = torch.zeros((len(some), 1, 1, len(used)), dtype=torch.int32, device=packed.device)
            lists = FlexLists(nothing, indices, nothing, indices)
            with uncompiled():
                attended.append(attend(packed[some].float(), key, value, mask, lists, scores, shape))
        return torch.cat(attended)


def _pack(query: torch.Tensor, rows: QueryRows, kv_heads: int) -> torch.Tensor:
    """Return `[rows, kv_heads, length * group, key_size]`, so that heads that share K and V read them once."""
    count, length = rows.tokens.shape
    chosen = query[rows.tokens].reshape(count, length, kv_heads, -1, query.shape[2])
    return chosen.transpose(1, 2).reshape(count, kv_heads, -1, query.shape[2])


def _with_room(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows padded to a power of two, so that few shapes occur.

    torch 2.13 cannot compile a mask that reads tensors of a size unknown at compile time: the generated C++ confuses
    the names of sizes.
    """
    room = rows.new_empty((max(_ROOM, next_power(len(rows))), *rows.shape[1:]))
    room[: len(rows)] = rows
    return room


def _counts(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.to(torch.int32)[:, None, None]


def _unused_slots(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and offsets of the slots beyond the end of each sequence whose last block this batch starts.

    Later writes to these blocks are tokens of this sequence, or whole blocks that were zeroed likewise.
    """
    first, ends = batch.first.tolist(), batch.ends.tolist()
    blocks: list[int] = []
    offsets: list[int] = []
    lasts = batch.slots[batch.first[1:].to(torch.int64) - 1].tolist()
    for (begin, after), end, last in zip(pairwise(first), ends, lasts, strict=True):
        used = (end - 1) % batch.block_size + 1
        if after - begin >= used:
            blocks += [last // batch.block_size] * (batch.block_size - used)
            offsets += range(used, batch.block_size)
    device = batch.slots.device
    return torch.tensor(blocks, dtype=torch.int64, device=device), torch.tensor(
        offsets, dtype=torch.int64, device=device
    )
