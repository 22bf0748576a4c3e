"""The inner loop of all attention kernels: one tile of query rows over the paged keys of a range of tokens.

The softmax is computed online (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022), in base 2.
"""

import triton
import triton.language as tl

from engine.triton_kernels.rounding import widened


@triton.jit
def attend_tiles(
    query,
    state,
    keys,
    table,
    begin,
    stop,
    last,
    block_stride,
    value_distance,
    scale,
    cap,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Update the state of a softmax with the keys of tokens `begin` to `stop`, and return it.

    `query`: `[ROWS, KEY_DIMS]`, zero beyond KEY_SIZE. `state`: `[ROWS, VALUE_DIMS]` weighted sums of V, `[ROWS]`
    maximum scores and `[ROWS]` sums of weights, float32. `keys`: K of one layer and KV head in block 0; V is
    `value_distance` elements later. `table`: the sequence's block ids. Scores are `q.k * scale`, or
    `tanh(q.k * scale) * cap` if CAPPED, in base 2.

    Unless MASKED, `stop - begin` is a multiple of KEYS and all rows see all tokens. If MASKED, row r sees the tokens up
    to `last[r]`, WINDOW of them (0: all), and slots from `stop` on are not read, because stale contents may be NaN.
    """
    sums, greatest, weights = state
    dims = tl.arange(0, query.shape[1])
    value_dims = tl.arange(0, sums.shape[1])
    for start in tl.range(begin, stop, KEYS, num_stages=STAGES):
        tokens = start + tl.arange(0, KEYS)
        if MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=tokens < stop, other=0)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE)
        rows = blocks.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * KEY_SIZE
        places = keys + rows[:, None] + dims[None, :]
        if KEY_SIZE == VALUE_SIZE:
            value_places = places + value_distance
        else:
            rows = blocks.to(tl.int64) * block_stride + (tokens % BLOCK_SIZE) * VALUE_SIZE
            value_places = keys + value_distance + rows[:, None] + value_dims[None, :]
        key = widened(_loaded(places, tokens, stop, KEY_SIZE, MASKED), INTERPRETED)
        value = widened(_loaded(value_places, tokens, stop, VALUE_SIZE, MASKED), INTERPRETED)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if CAPPED:
            shrunk = tl.exp2(tl.abs(scores) * -2.8853900817779268)  # exp(-2x), from which tanh is computed
            scores = tl.where(scores < 0, -cap, cap) * ((1 - shrunk) / (1 + shrunk))
        if MASKED:
            seen = tokens[None, :] <= last[:, None]
            if WINDOW > 0:
                seen = seen & (tokens[None, :] > last[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        # `greatest` starts finite, because a row that sees no key of a tile would yield NaN from infinities.
        grown = tl.maximum(greatest, tl.max(scores, 1))
        faded = tl.exp2(greatest - grown)
        parts = tl.exp2(scores - grown[:, None])
        weights = weights * faded + tl.sum(parts, 1)
        sums = tl.dot(parts.to(value.dtype), value, sums * faded[:, None], input_precision="ieee")
        greatest = grown
    return sums, greatest, weights


@triton.jit
def _loaded(places, tokens, stop, SIZE: tl.constexpr, MASKED: tl.constexpr):
    """Return K or V at `[KEYS, DIMS]` places: zeros beyond SIZE and, if MASKED, of tokens from `stop` on."""
    dims = tl.arange(0, places.shape[1])
    if MASKED:
        return tl.load(places, mask=(tokens < stop)[:, None] & (dims < SIZE)[None, :], other=0)
    elif places.shape[1] > SIZE:  # noqa: RET505 - the compiler needs all branches
        return tl.load(places, mask=(tokens >= 0)[:, None] & (dims < SIZE)[None, :], other=0)
    else:
        return tl.load(places)


@triton.jit
def share_of_keys(greatest, weights, sinks, heads, INTERPRETED: tl.constexpr):
    """Return what part of a softmax over keys and a sink is that of the keys, float32, from 0 to 1.

    `greatest`, `weights`: state of the softmax over all keys. `heads`: of the same shape, the query head of each row.
    """
    sink = widened(tl.load(sinks + heads), INTERPRETED).to(tl.float32) * 1.4426950408889634  # to base 2
    # Both are at most 1, so a sink far above or below all scores leaves 0 or 1.
    grown = tl.maximum(greatest, sink)
    of_keys = weights * tl.exp2(greatest - grown)
    return of_keys / (of_keys + tl.exp2(sink - grown))
