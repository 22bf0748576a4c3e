"""Attention of sequences that feed one token: split along the context, then combined.

The query heads of a KV head are the rows of one tile, so that K and V are read once (grouped-query packing). A fixed
number of programs processes the list of items. A sequence with more than one item leaves partial results with the
logarithms of their weights, which the program that ends last combines (Flash-Decoding; FlashInfer's state merge): it
waits for none, and the order of the sum is that of the items.
"""

import torch
import triton
import triton.language as tl

from engine.attention.backend import PagedBatch
from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.repeated import KernelLaunch
from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.scores import ScoreFactors, attention_arguments
from engine.triton_kernels.softmax_tiles import attend_tiles, share_of_keys
from engine.triton_kernels.tuning import INTERPRETED, Tuning, padded
from engine.triton_kernels.work_list import WorkList

_COMBINED = 16  # items whose partial results are combined at once
_COMBINED_ELEMENTS = 512  # of their results: of as many query heads as have them


def decode(
    query: torch.Tensor,
    output: torch.Tensor,
    layer: PagedLayer,
    batch: PagedBatch,
    work: WorkList,
    factors: ScoreFactors,
    tuning: Tuning,
) -> list[KernelLaunch]:
    """Attend for sequences that feed one token, into their rows of `output`; other rows are unchanged.

    `query`: `[tokens, heads, key_size]`. `output`: `[tokens, heads, value_size]`, contiguous. The launch does not
    depend on lengths, so it can be captured in a graph and replayed for other lengths after the work is listed again.
    It can be repeated for another layer of the same shape and scoring, with its `attention_arguments`.
    """
    heads = query.shape[1]
    attended = KernelLaunch(
        _decode,
        (tuning.programs,),
        attention_arguments(query, output, layer, factors),
        {
            "partial_output": work.partial_output,
            "partial_logarithms": work.partial_logarithms,
            "cache": layer.memory,
            "tables": batch.tables,
            "first": batch.first,
            "items": work.items,
            "totals": work.totals,
            "pieces": work.pieces,
            "arrived": work.arrived,
            "query_token_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "table_stride": batch.tables.stride(0),
            "block_stride": layer.memory.stride(0),
            "value_distance": layer.value_distance,
            "scale": factors.scale,
            "cap": factors.cap,
        },
        CAPPED=factors.capped,
        HAS_SINKS=factors.sinks is not None,
        KV_HEADS=layer.kv_heads,
        GROUP=heads // layer.kv_heads,
        BLOCK_SIZE=layer.block_size,
        KEY_SIZE=layer.key_size,
        VALUE_SIZE=layer.value_size,
        ROWS=tuning.decode.rows,
        KEY_DIMS=padded(layer.key_size),
        VALUE_DIMS=padded(layer.value_size),
        KEYS=tuning.decode.keys,
        STAGES=tuning.decode.stages,
        COMBINED=_COMBINED,
        TOGETHER=_heads_together(heads // layer.kv_heads, padded(layer.value_size)),
        INTERPRETED=INTERPRETED,
        num_warps=tuning.decode.warps,
    )
    return [attended]


def _heads_together(group: int, value_dims: int) -> int:
    """Return how many query heads of a group are combined at once, so that all their results are read at once."""
    return min(padded(group, least=1), max(1, _COMBINED_ELEMENTS // value_dims))


@triton.jit(do_not_specialize=["table_stride"])
def _decode(
    query,
    output,
    sinks,
    key_offset,
    partial_output,
    partial_logarithms,
    cache,
    tables,
    first,
    items,
    totals,
    pieces,
    arrived,
    query_token_stride,
    query_head_stride,
    table_stride,
    block_stride,
    value_distance,
    scale,
    cap,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    COMBINED: tl.constexpr,
    TOGETHER: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Process every `programs`-th unit of work: an item for one KV head."""
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, KEY_DIMS)
    value_dims = tl.arange(0, VALUE_DIMS)
    there = (rows < GROUP)[:, None] & (dims < KEY_SIZE)[None, :]
    kept = (rows < GROUP)[:, None] & (value_dims < VALUE_SIZE)[None, :]
    total = tl.load(totals) * KV_HEADS
    for piece in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        item = piece // KV_HEADS
        kv_head = piece % KV_HEADS
        sequence = tl.load(items + item * 4)
        begin = tl.load(items + item * 4 + 1)
        stop = tl.load(items + item * 4 + 2)
        alone = tl.load(items + item * 4 + 3)
        token = tl.load(first + sequence).to(tl.int64)
        heads = kv_head * GROUP + rows
        places = query + token * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
        packed = widened(tl.load(places, mask=there, other=0), INTERPRETED)

        keys = cache + key_offset + kv_head * (BLOCK_SIZE * KEY_SIZE)
        to_value = value_distance + kv_head * (BLOCK_SIZE * (VALUE_SIZE - KEY_SIZE))
        table = tables + sequence.to(tl.int64) * table_stride
        last = tl.zeros([ROWS], tl.int32) + stop - 1
        whole = begin + (stop - begin) // KEYS * KEYS
        state = (
            tl.zeros([ROWS, VALUE_DIMS], tl.float32),
            tl.full([ROWS], -1e30, tl.float32),
            tl.zeros([ROWS], tl.float32),
        )
        state = attend_tiles(
            packed, state, keys, table, begin, whole, last, block_stride, to_value, scale, cap,
            0, CAPPED, False, BLOCK_SIZE, KEY_SIZE, VALUE_SIZE, KEYS, STAGES, INTERPRETED,
        )  # fmt: skip
        sums, greatest, weights = attend_tiles(
            packed, state, keys, table, whole, stop, last, block_stride, to_value, scale, cap,
            0, CAPPED, True, BLOCK_SIZE, KEY_SIZE, VALUE_SIZE, KEYS, 1, INTERPRETED,
        )  # fmt: skip
        attended = sums / weights[:, None]
        if alone == 1:
            if HAS_SINKS:
                filled = kv_head * GROUP + tl.minimum(rows, GROUP - 1)
                result = attended * share_of_keys(greatest, weights, sinks, filled, INTERPRETED)[:, None]
            else:
                result = attended
            targets = output + (token * (KV_HEADS * GROUP) + heads[:, None]) * VALUE_SIZE + value_dims[None, :]
            tl.store(targets, rounded(result, output.dtype.element_ty, INTERPRETED), mask=kept)
        else:
            slots = item.to(tl.int64) * (KV_HEADS * GROUP) + heads
            tl.store(partial_output + slots[:, None] * VALUE_SIZE + value_dims[None, :], attended, mask=kept)
            tl.store(partial_logarithms + slots, greatest + tl.log2(weights), mask=rows < GROUP)
            # All threads have stored before one of them counts. The last program of a sequence and KV head sees the
            # results of the others, and combines all in the order of the items, whoever was last.
            tl.debug_barrier()
            count = tl.load(pieces + sequence * 2 + 1)
            counter = arrived + sequence * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(counter, 0)  # for the next layer
                first_item = tl.load(pieces + sequence * 2)
                for row in tl.range(0, GROUP, TOGETHER):
                    _combine(
                        output, sinks, partial_output, partial_logarithms, token, first_item, count, kv_head, row,
                        HAS_SINKS, KV_HEADS, GROUP, VALUE_SIZE, VALUE_DIMS, COMBINED, TOGETHER, INTERPRETED,
                    )  # fmt: skip


@triton.jit
def _combine(
    output,
    sinks,
    partial_output,
    partial_logarithms,
    token,
    item,
    count,
    kv_head,
    row,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    COMBINED: tl.constexpr,
    TOGETHER: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Combine the results of `count` items from `item` on, for query heads of one token: TOGETHER ones from `row` on.

    One thread has all of COMBINED items, for a few elements: their sum needs no exchange between threads.
    """
    rows = row + tl.arange(0, TOGETHER)
    dims = tl.arange(0, VALUE_DIMS)
    heads = kv_head * GROUP + rows
    sums = tl.zeros([TOGETHER, VALUE_DIMS], tl.float32)
    greatest = tl.full([TOGETHER], -1e30, tl.float32)
    weights = tl.zeros([TOGETHER], tl.float32)
    for start in tl.range(0, count, COMBINED):
        number = start + tl.arange(0, COMBINED)
        slots = (item + number).to(tl.int64)[:, None] * (KV_HEADS * GROUP) + heads[None, :]
        there = (number < count)[:, None] & (rows < GROUP)[None, :]
        logarithms = tl.load(partial_logarithms + slots, mask=there, other=float("-inf"))
        places = slots[:, :, None] * VALUE_SIZE + dims[None, None, :]
        parts = tl.load(partial_output + places, mask=there[:, :, None] & (dims < VALUE_SIZE)[None, None, :], other=0)
        grown = tl.maximum(greatest, tl.max(logarithms, 0))
        shares = tl.exp2(logarithms - grown[None, :])
        faded = tl.exp2(greatest - grown)
        sums = sums * faded[:, None] + tl.sum(parts * shares[:, :, None], 0)
        weights = weights * faded + tl.sum(shares, 0)
        greatest = grown
    weights = tl.where(rows < GROUP, weights, 1.0)
    attended = sums / weights[:, None]
    if HAS_SINKS:
        filled = kv_head * GROUP + tl.minimum(rows, GROUP - 1)
        attended = attended * share_of_keys(greatest, weights, sinks, filled, INTERPRETED)[:, None]
    places = output + (token * (KV_HEADS * GROUP) + heads[:, None]) * VALUE_SIZE + dims[None, :]
    kept = (rows < GROUP)[:, None] & (dims < VALUE_SIZE)[None, :]
    tl.store(places, rounded(attended, output.dtype.element_ty, INTERPRETED), mask=kept)
