"""The attention work of a batch, as lists that a kernel computes on the device from the lengths.

Decoding sequences are split along their context into items of about equal work, as in the schedulers of LightLLM and
FlashInfer, but without lengths on the host. Prompts are split along the fed tokens, into tiles.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.attention.backend import PagedBatch
from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.tuning import Tuning

_LANES = 256  # sequences that the planner processes at once
_NO_WINDOW = 2**31 - 1


@dataclass(frozen=True)
class WorkList:
    """The work of one batch for layers of the same shape and window. int32.

    `items`: `[capacity, 4]` sequence, first token, end token, and 1 if the sequence has no other item. `tiles`:
    `[capacity, 2]` sequence, and first fed token of the tile. `totals`: `[2]` number of items and tiles. `pieces`:
    `[sequences, 2]` first item of each sequence, and its number of items.

    `partial_output`, `[capacity, heads, value_size]`, and `partial_logarithms`, `[capacity, heads]`, are float32 and
    hold the results of items. `arrived`: `[sequences, kv_heads]` number of items of each sequence that have them, 0
    before and after a layer.
    """

    items: torch.Tensor
    tiles: torch.Tensor
    totals: torch.Tensor
    pieces: torch.Tensor
    arrived: torch.Tensor
    partial_output: torch.Tensor
    partial_logarithms: torch.Tensor

    @classmethod
    def allocate(cls, sequences: int, tiles: int, heads: int, layer: PagedLayer, tuning: Tuning) -> "WorkList":
        """Allocate for `sequences` sequences of any length, and `tiles` tiles of prompts."""
        # Each item, except the last one of a sequence, has at least its share of all keys.
        capacity = sequences + -(-tuning.pieces // layer.kv_heads)
        device = layer.memory.device
        lists = ((capacity, 4), (tiles, 2), (2,), (sequences, 2), (sequences, layer.kv_heads))
        partials = ((capacity, heads, layer.value_size), (capacity, heads))
        return cls(
            *(torch.empty(shape, dtype=torch.int32, device=device) for shape in lists),
            *(torch.empty(shape, dtype=torch.float32, device=device) for shape in partials),
        )


def tile_tokens(group: int, tuning: Tuning) -> int:
    """Return the tokens of a prompt in one tile, whose rows are all query heads of a KV head."""
    return tuning.prefill.rows // group


def tile_count(batch: PagedBatch, group: int, tuning: Tuning) -> int:
    """Return the number of tiles of a batch's prompts, known on the host."""
    each = tile_tokens(group, tuning)
    return sum(-(-fed // each) for fed in batch.fed if fed > 1)


def list_work(work: WorkList, batch: PagedBatch, kv_heads: int, group: int, window: int | None, tuning: Tuning) -> None:
    """Fill the lists for a batch. Sequences without tokens have no work."""
    sequences = len(batch.ends)
    _list_work[(sequences,)](
        batch.first,
        batch.ends,
        work.items,
        work.tiles,
        work.totals,
        work.pieces,
        work.arrived,
        sequences,
        _NO_WINDOW if window is None else window,
        tuning.pieces,
        tuning.min_chunk,
        KV_HEADS=kv_heads,
        KEYS=tuning.decode.keys,
        TOKENS=tile_tokens(group, tuning),
        LANES=_LANES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["sequences", "window", "wanted", "min_chunk"])
def _list_work(
    first,
    ends,
    items,
    tiles,
    totals,
    pieces,
    arrived,
    sequences,
    window,
    wanted,
    min_chunk,
    KV_HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """List the work of one sequence for each program, which sums the work of earlier sequences itself."""
    mine = tl.program_id(0)
    lanes = tl.arange(0, LANES)
    visible = tl.zeros([LANES], tl.int64)
    for start in tl.range(0, sequences, LANES):
        fed, end = _fed_and_end(first, ends, start + lanes, start + lanes < sequences)
        visible += tl.where(fed == 1, tl.minimum(end, window), 0)
    share = (tl.sum(visible, 0) * KV_HEADS + wanted - 1) // wanted
    share = tl.maximum(share, min_chunk).to(tl.int32)
    chunk = (share + KEYS - 1) // KEYS * KEYS

    items_before = tl.zeros([LANES], tl.int32)
    tiles_before = tl.zeros([LANES], tl.int32)
    for start in tl.range(0, sequences, LANES):
        fed, end = _fed_and_end(first, ends, start + lanes, start + lanes < mine)
        items_before += tl.where(fed == 1, (tl.minimum(end, window) + chunk - 1) // chunk, 0)
        tiles_before += tl.where(fed > 1, (fed + TOKENS - 1) // TOKENS, 0)
    item = tl.sum(items_before, 0)
    tile = tl.sum(tiles_before, 0)

    fed = tl.load(first + mine + 1) - tl.load(first + mine)
    end = tl.load(ends + mine)
    begin = tl.maximum(end - window, 0)
    item_count = tl.where(fed == 1, (end - begin + chunk - 1) // chunk, 0)
    tile_count = tl.where(fed > 1, (fed + TOKENS - 1) // TOKENS, 0)
    for start in tl.range(0, item_count, LANES):
        number = start + lanes
        there = number < item_count
        place = items + (item + number) * 4
        tl.store(place, mine + tl.zeros_like(number), mask=there)
        tl.store(place + 1, begin + number * chunk, mask=there)
        tl.store(place + 2, tl.minimum(begin + (number + 1) * chunk, end), mask=there)
        tl.store(place + 3, (item_count == 1).to(tl.int32) + tl.zeros_like(number), mask=there)
    for start in tl.range(0, tile_count, LANES):
        number = start + lanes
        there = number < tile_count
        place = tiles + (tile + number) * 2
        tl.store(place, mine + tl.zeros_like(number), mask=there)
        # The last tokens see most keys, so the longest work starts first.
        tl.store(place + 1, (tile_count - 1 - number) * TOKENS, mask=there)
    for head in range(KV_HEADS):
        tl.store(arrived + mine * KV_HEADS + head, 0)
    tl.store(pieces + mine * 2, item)
    tl.store(pieces + mine * 2 + 1, item_count)
    if mine == sequences - 1:
        tl.store(totals, item + item_count)
        tl.store(totals + 1, tile + tile_count)


@triton.jit
def _fed_and_end(first, ends, numbers, there):
    """Return the fed tokens and the lengths of sequences; 0 for absent ones."""
    begin = tl.load(first + numbers, mask=there, other=0)
    fed = tl.load(first + numbers + 1, mask=there, other=0) - begin
    return fed, tl.load(ends + numbers, mask=there, other=0)
