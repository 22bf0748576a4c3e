"""Attention of prompts and chunks of prompts: tiles of fed tokens over the cached context.

Keys visible to all rows of a tile are processed without a mask, as in SGLang's extend kernel. There, the keys of the
fed tokens come from the activations. Here they are read from the cache, where they were just written and still are in
L2.

Few tiles behind a long prefix would leave most of the device idle. Then the keys of each tile are split over several
programs, and a second kernel merges their results (Flash-Decoding, as in decoding).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from engine.attention.backend import PagedBatch
from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.repeated import KernelLaunch
from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.scores import ScoreFactors, attention_arguments
from engine.triton_kernels.softmax_tiles import attend_tiles, share_of_keys
from engine.triton_kernels.tuning import INTERPRETED, Tuning, merge_warps, padded
from engine.triton_kernels.work_list import WorkList, tile_tokens

_MERGED_ROWS = 16  # of a tile, by one program


def prefill(
    query: torch.Tensor,
    output: torch.Tensor,
    layer: PagedLayer,
    batch: PagedBatch,
    work: WorkList,
    factors: ScoreFactors,
    tuning: Tuning,
) -> list[KernelLaunch]:
    """Attend for sequences that feed more than one token, into their rows of `output`.

    `query`: `[tokens, heads, key_size]`. `output`: `[tokens, heads, value_size]`, contiguous. The launches can be
    repeated for another layer of the same shape and scoring, with its `attention_arguments`: it uses the same partial
    results.
    """
    tiles, rows = len(work.tiles), tuning.prefill.rows
    splits = split_count(tiles, layer.kv_heads, batch.tables.shape[1] * layer.block_size, tuning)
    parts = (tiles * layer.kv_heads * splits, rows) if splits > 1 else (0, rows)
    partials = {
        "partial_sums": torch.empty(*parts, layer.value_size, dtype=torch.float32, device=query.device),
        "partial_weights": torch.empty(*parts, 2, dtype=torch.float32, device=query.device),
    }
    attended = KernelLaunch(
        _prefill,
        (tiles, layer.kv_heads, splits),
        attention_arguments(query, output, layer, factors),
        {
            **partials,
            "cache": layer.memory,
            "tables": batch.tables,
            "first": batch.first,
            "ends": batch.ends,
            "tiles": work.tiles,
            "totals": work.totals,
            "query_token_stride": query.stride(0),
            "query_head_stride": query.stride(1),
            "table_stride": batch.tables.stride(0),
            "block_stride": layer.memory.stride(0),
            "value_distance": layer.value_distance,
            "min_chunk": tuning.min_chunk,
            "scale": factors.scale,
            "cap": factors.cap,
        },
        SPLIT=splits > 1,
        CAPPED=factors.capped,
        BLOCK_SIZE=layer.block_size,
        KEY_SIZE=layer.key_size,
        KEY_DIMS=padded(layer.key_size),
        STAGES=tuning.prefill.stages,
        num_warps=tuning.prefill.warps,
        **_constants(query.shape[1], layer, factors, tuning),
    )
    return [attended, *_merge_parts(output, partials, layer, batch, work, factors, tuning, splits)]


def _constants(heads: int, layer: PagedLayer, factors: ScoreFactors, tuning: Tuning) -> dict[str, Any]:
    """Return the constants of both kernels."""
    group = heads // layer.kv_heads
    return {
        "WINDOW": factors.window,
        "HAS_SINKS": factors.sinks is not None,
        "KV_HEADS": layer.kv_heads,
        "GROUP": group,
        "TOKENS": tile_tokens(group, tuning),
        "VALUE_SIZE": layer.value_size,
        "ROWS": tuning.prefill.rows,
        "VALUE_DIMS": padded(layer.value_size),
        "KEYS": tuning.prefill.keys,
        "INTERPRETED": INTERPRETED,
    }


def _merge_parts(
    output: torch.Tensor,
    partials: dict[str, torch.Tensor],
    layer: PagedLayer,
    batch: PagedBatch,
    work: WorkList,
    factors: ScoreFactors,
    tuning: Tuning,
    splits: int,
) -> list[KernelLaunch]:
    """Merge the results of split tiles into their rows of `output`.

    `partial_sums`: `[tiles * kv_heads * splits, rows, value_size]` float32, not divided. `partial_weights`: the same
    parts and rows, `[..., 2]` float32: the greatest score, and the sum of the weights.
    """
    if splits == 1:
        return []
    programs = triton.cdiv(tuning.prefill.rows, _MERGED_ROWS)
    merged = KernelLaunch(
        _merge,
        (len(work.tiles), layer.kv_heads, programs),
        {"output": output, "sinks": factors.sinks},
        {
            **partials,
            "first": batch.first,
            "ends": batch.ends,
            "tiles": work.tiles,
            "totals": work.totals,
            "min_chunk": tuning.min_chunk,
            "splits": splits,
        },
        MERGED=_MERGED_ROWS,
        num_warps=merge_warps(padded(layer.value_size)),
        **_constants(output.shape[1], layer, factors, tuning),
    )
    return [merged]


def split_count(tiles: int, kv_heads: int, most_keys: int, tuning: Tuning) -> int:
    """Return the number of programs that share the keys of one tile and KV head.

    Together the programs occupy the device, and each has at least one chunk of the longest sequence, of `most_keys`
    keys. All numbers are on the host, so nothing waits for the device.
    """
    return max(1, min(tuning.prefill_programs // (tiles * kv_heads), most_keys // tuning.min_chunk))


@triton.jit
def _range_of_tile(first, ends, tiles, tile, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """Return a tile's sequence, its first and last fed token, and the range of keys that its tokens see."""
    sequence = tl.load(tiles + tile * 2)
    begin = tl.load(tiles + tile * 2 + 1)
    fed = tl.load(first + sequence + 1) - tl.load(first + sequence)
    prefix = tl.load(ends + sequence) - fed
    final = tl.minimum(begin + TOKENS, fed) - 1
    oldest = tl.zeros_like(prefix)
    if WINDOW > 0:
        oldest = tl.maximum(prefix + begin + 1 - WINDOW, 0)
    return sequence, begin, final, prefix, oldest, prefix + final + 1


@triton.jit
def _chunk_of(keys, splits, min_chunk, KEYS: tl.constexpr):
    """Return the keys of one program, a multiple of KEYS."""
    return (tl.maximum((keys + splits - 1) // splits, min_chunk) + KEYS - 1) // KEYS * KEYS


@triton.jit(do_not_specialize=["table_stride", "min_chunk"])
def _prefill(
    query,
    output,
    sinks,
    key_offset,
    partial_sums,
    partial_weights,
    cache,
    tables,
    first,
    ends,
    tiles,
    totals,
    query_token_stride,
    query_head_stride,
    table_stride,
    block_stride,
    value_distance,
    min_chunk,
    scale,
    cap,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attend for one tile of fed tokens and the query heads of one KV head, to all keys or to one part of them."""
    tile = tl.program_id(0)
    if tile < tl.load(totals + 1):
        kv_head = tl.program_id(1)
        sequence, begin, final, prefix, oldest, stop = _range_of_tile(first, ends, tiles, tile, TOKENS, WINDOW)
        mine, mine_stop = oldest, stop
        whole_tile = True
        if SPLIT:
            chunk = _chunk_of(stop - oldest, tl.num_programs(2), min_chunk, KEYS)
            mine = oldest + tl.program_id(2) * chunk
            mine_stop = tl.minimum(mine + chunk, stop)
            whole_tile = stop - oldest <= chunk
        if mine < mine_stop:
            place = tl.load(first + sequence)
            rows = tl.arange(0, ROWS)
            dims = tl.arange(0, KEY_DIMS)
            value_dims = tl.arange(0, VALUE_DIMS)
            tokens = tl.minimum(begin + rows // GROUP, final)
            heads = kv_head * GROUP + rows % GROUP
            filled = begin + rows // GROUP <= final
            there = filled[:, None] & (dims < KEY_SIZE)[None, :]
            kept = filled[:, None] & (value_dims < VALUE_SIZE)[None, :]
            batch_rows = (place + tokens).to(tl.int64)
            places = batch_rows[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
            packed = widened(tl.load(query + places, mask=there, other=0), INTERPRETED)

            keys = cache + key_offset + kv_head.to(tl.int64) * (BLOCK_SIZE * KEY_SIZE)
            to_value = value_distance + kv_head * (BLOCK_SIZE * (VALUE_SIZE - KEY_SIZE))
            table = tables + sequence.to(tl.int64) * table_stride
            last = prefix + tokens
            all_see_until = prefix + begin + 1
            whole = tl.zeros_like(stop)  # start of the tiles of keys that all rows see
            if WINDOW > 0:
                all_see_from = tl.maximum(stop - WINDOW, 0)
                whole = tl.minimum(oldest + (all_see_from - oldest + KEYS - 1) // KEYS * KEYS, stop)
            ragged = whole + tl.maximum(all_see_until - whole, 0) // KEYS * KEYS
            # All parts begin and end whole tiles of keys behind `oldest`, or at `stop`.
            whole = tl.minimum(tl.maximum(whole, mine), mine_stop)
            ragged = tl.minimum(tl.maximum(ragged, mine), mine_stop)
            state = (
                tl.zeros([ROWS, VALUE_DIMS], tl.float32),
                tl.full([ROWS], -1e30, tl.float32),
                tl.zeros([ROWS], tl.float32),
            )
            if WINDOW > 0:
                state = attend_tiles(
                    packed, state, keys, table, mine, whole, last, block_stride, to_value, scale, cap,
                    WINDOW, CAPPED, True, BLOCK_SIZE, KEY_SIZE, VALUE_SIZE, KEYS, STAGES, INTERPRETED,
                )  # fmt: skip
            state = attend_tiles(
                packed, state, keys, table, whole, ragged, last, block_stride, to_value, scale, cap,
                WINDOW, CAPPED, False, BLOCK_SIZE, KEY_SIZE, VALUE_SIZE, KEYS, STAGES, INTERPRETED,
            )  # fmt: skip
            sums, greatest, weights = attend_tiles(
                packed, state, keys, table, ragged, mine_stop, last, block_stride, to_value, scale, cap,
                WINDOW, CAPPED, True, BLOCK_SIZE, KEY_SIZE, VALUE_SIZE, KEYS, STAGES, INTERPRETED,
            )  # fmt: skip
            if whole_tile:
                targets = (batch_rows[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * VALUE_SIZE + value_dims[None, :]
                attended = sums / weights[:, None]
                if HAS_SINKS:
                    attended = attended * share_of_keys(greatest, weights, sinks, heads, INTERPRETED)[:, None]
                tl.store(output + targets, rounded(attended, output.dtype.element_ty, INTERPRETED), mask=kept)
            elif SPLIT:
                # Not divided, because a row may see none of these keys.
                part = (tile * KV_HEADS + kv_head).to(tl.int64) * tl.num_programs(2) + tl.program_id(2)
                slots = part * ROWS + rows
                tl.store(partial_sums + slots[:, None] * VALUE_SIZE + value_dims[None, :], sums, mask=kept)
                tl.store(partial_weights + slots * 2, greatest)
                tl.store(partial_weights + slots * 2 + 1, weights)


@triton.jit(do_not_specialize=["min_chunk", "splits"])
def _merge(
    output,
    sinks,
    partial_sums,
    partial_weights,
    first,
    ends,
    tiles,
    totals,
    min_chunk,
    splits,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    MERGED: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    KEYS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Merge the results of a tile's parts for a few of its rows, if it has several parts."""
    tile = tl.program_id(0)
    if tile < tl.load(totals + 1):
        sequence, begin, final, _, oldest, stop = _range_of_tile(first, ends, tiles, tile, TOKENS, WINDOW)
        count = tl.cdiv(stop - oldest, _chunk_of(stop - oldest, splits, min_chunk, KEYS))
        if count > 1:
            kv_head = tl.program_id(1)
            rows = tl.program_id(2) * MERGED + tl.arange(0, MERGED)
            dims = tl.arange(0, VALUE_DIMS)
            tokens = begin + rows // GROUP
            filled = (rows < ROWS) & (tokens <= final)
            there = filled[:, None] & (dims < VALUE_SIZE)[None, :]
            sums = tl.zeros([MERGED, VALUE_DIMS], tl.float32)
            greatest = tl.full([MERGED], -1e30, tl.float32)
            weights = tl.zeros([MERGED], tl.float32)
            for number in tl.range(0, count):
                slots = ((tile * KV_HEADS + kv_head).to(tl.int64) * splits + number) * ROWS + rows
                most = tl.load(partial_weights + slots * 2, mask=filled, other=-1e30)
                part_weights = tl.load(partial_weights + slots * 2 + 1, mask=filled, other=0)
                part = tl.load(partial_sums + slots[:, None] * VALUE_SIZE + dims[None, :], mask=there, other=0)
                grown = tl.maximum(greatest, most)
                faded = tl.exp2(greatest - grown)
                share = tl.exp2(most - grown)
                sums = sums * faded[:, None] + part * share[:, None]
                weights = weights * faded + part_weights * share
                greatest = grown
            heads = kv_head * GROUP + rows % GROUP
            batch_rows = (tl.load(first + sequence) + tokens).to(tl.int64)
            places = (batch_rows[:, None] * (KV_HEADS * GROUP) + heads[:, None]) * VALUE_SIZE + dims[None, :]
            weights = tl.where(filled, weights, 1.0)
            attended = sums / weights[:, None]
            if HAS_SINKS:
                attended = attended * share_of_keys(greatest, weights, sinks, heads, INTERPRETED)[:, None]
            tl.store(output + places, rounded(attended, output.dtype.element_ty, INTERPRETED), mask=there)
