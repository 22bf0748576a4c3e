"""Attention of prompts and chunks of prompts: tiles of fed tokens over the cached context.

Keys visible to all rows of a tile are processed without a mask, as in SGLang's extend kernel. There, the keys of the
fed tokens come from the activations. Here they are read from the cache, where they were just written and still are in
L2.
"""

import torch
import triton
import triton.language as tl

from engine.attention.backend import PagedBatch
from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.scores import ScoreFactors
from engine.triton_kernels.softmax_tiles import attend_tiles
from engine.triton_kernels.tuning import INTERPRETED, Tuning, padded
from engine.triton_kernels.work_list import WorkList, tile_tokens


def prefill(
    query: torch.Tensor,
    output: torch.Tensor,
    layer: PagedLayer,
    batch: PagedBatch,
    work: WorkList,
    factors: ScoreFactors,
    tuning: Tuning,
) -> None:
    """Attend for sequences that feed more than one token, into their rows of `output`.

    `query` and `output`: `[tokens, heads, head_size]`, the latter contiguous.
    """
    size = query.shape[2]
    group = query.shape[1] // layer.kv_heads
    _prefill[(len(work.tiles), layer.kv_heads)](
        query,
        output,
        layer.memory,
        batch.tables,
        batch.first,
        batch.ends,
        work.tiles,
        work.totals,
        layer.number,
        query.stride(0),
        query.stride(1),
        batch.tables.stride(0),
        *layer.strides,
        factors.scale,
        factors.cap,
        WINDOW=factors.window,
        CAPPED=factors.capped,
        KV_HEADS=layer.kv_heads,
        GROUP=group,
        TOKENS=tile_tokens(group, tuning),
        BLOCK_SIZE=layer.block_size,
        HEAD_SIZE=size,
        ROWS=tuning.prefill.rows,
        DIMS=padded(size),
        KEYS=tuning.prefill.keys,
        STAGES=tuning.prefill.stages,
        INTERPRETED=INTERPRETED,
        num_warps=tuning.prefill.warps,
    )


@triton.jit(do_not_specialize=["layer", "table_stride"])
def _prefill(
    query,
    output,
    cache,
    tables,
    first,
    ends,
    tiles,
    totals,
    layer,
    query_token_stride,
    query_head_stride,
    table_stride,
    block_stride,
    layer_stride,
    value_offset,
    scale,
    cap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attend for one tile of fed tokens and the query heads of one KV head."""
    tile = tl.program_id(0)
    if tile < tl.load(totals + 1):
        kv_head = tl.program_id(1)
        sequence = tl.load(tiles + tile * 2)
        begin = tl.load(tiles + tile * 2 + 1)
        place = tl.load(first + sequence)
        fed = tl.load(first + sequence + 1) - place
        prefix = tl.load(ends + sequence) - fed

        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIMS)
        final = tl.minimum(begin + TOKENS, fed) - 1
        tokens = tl.minimum(begin + rows // GROUP, final)
        heads = kv_head * GROUP + rows % GROUP
        there = (begin + rows // GROUP <= final)[:, None] & (dims < HEAD_SIZE)[None, :]
        batch_rows = (place + tokens).to(tl.int64)
        places = batch_rows[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
        packed = widened(tl.load(query + places, mask=there, other=0), INTERPRETED)

        keys = cache + layer.to(tl.int64) * layer_stride + kv_head.to(tl.int64) * (BLOCK_SIZE * HEAD_SIZE)
        table = tables + sequence.to(tl.int64) * table_stride
        last = prefix + tokens
        stop = prefix + final + 1  # end of the keys visible to the tile's last token
        all_see_until = prefix + begin + 1
        oldest = tl.zeros_like(stop)
        whole = tl.zeros_like(stop)  # start of the tiles whose keys all rows see
        if WINDOW > 0:
            oldest = tl.maximum(prefix + begin + 1 - WINDOW, 0)
            all_see_from = tl.maximum(stop - WINDOW, 0)
            whole = tl.minimum(oldest + (all_see_from - oldest + KEYS - 1) // KEYS * KEYS, stop)
        ragged = whole + tl.maximum(all_see_until - whole, 0) // KEYS * KEYS
        state = (
            tl.zeros([ROWS, DIMS], tl.float32),
            tl.full([ROWS], -1e30, tl.float32),
            tl.zeros([ROWS], tl.float32),
        )
        if WINDOW > 0:
            state = attend_tiles(
                packed, state, keys, table, oldest, whole, last, block_stride, value_offset, scale, cap,
                WINDOW, CAPPED, True, BLOCK_SIZE, HEAD_SIZE, KEYS, STAGES, INTERPRETED,
            )  # fmt: skip
        state = attend_tiles(
            packed, state, keys, table, whole, ragged, last, block_stride, value_offset, scale, cap,
            WINDOW, CAPPED, False, BLOCK_SIZE, HEAD_SIZE, KEYS, STAGES, INTERPRETED,
        )  # fmt: skip
        sums, _, weights = attend_tiles(
            packed, state, keys, table, ragged, stop, last, block_stride, value_offset, scale, cap,
            WINDOW, CAPPED, True, BLOCK_SIZE, HEAD_SIZE, KEYS, STAGES, INTERPRETED,
        )  # fmt: skip
        places = (batch_rows[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_SIZE + dims[None, :]
        attended = rounded(sums / weights[:, None], output.dtype.element_ty, INTERPRETED)
        tl.store(output + places, attended, mask=there)
