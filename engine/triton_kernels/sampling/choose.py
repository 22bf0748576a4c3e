"""Chooses each row's token: from its tiles, or from the candidates that its filters keep."""

import triton
import triton.language as tl

from engine.triton_kernels.sampling.candidates import is_finite, largest
from engine.triton_kernels.sampling.noise import gumbel_noise, key_of, number_of, ordered, token_of, with_token
from engine.triton_kernels.sampling.scan import (
    advances,
    min_p_of,
    place_of,
    slot_of,
    state_of,
    temperature_of,
    top_k_of,
    top_p_of,
)

_NOTHING = tl.constexpr(-(1 << 63))
_INFINITE = tl.constexpr(0x7F800000)  # the bits of an infinite distance
_MAX_COUNT = tl.constexpr(0x7FFF)
# 16 would take 8 rounds instead of 11, but half as many instructions more in each, and registers that leave a processor
# one program.
_PIVOTS = tl.constexpr(8)


@triton.jit
def _kept(distances, index, length, min_p, bound, last):
    """Return bits of distances, weights, and which candidates are kept.

    Those are the ones of at least min_p with bits below `bound`, and the ones equal to it up to the index `last`.
    Distances are not negative, so their bits have their order.
    """
    distance = tl.load(distances + index, mask=index < length, other=float("inf"))
    bits = distance.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # -0.0 is 0
    weight = tl.exp(-distance)
    kept = (index < length) & (weight >= min_p) & ((bits < bound) | ((bits == bound) & (index <= last)))
    return bits, weight, kept


@triton.jit
def _sums(distances, length, min_p, bound, last, below, CHUNK: tl.constexpr):
    """Return the number and the weight of the kept candidates with bits below `below`."""
    counts, masses = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.float32)
    for start in range(0, length, CHUNK):
        index = start + tl.arange(0, CHUNK)
        bits, weight, kept = _kept(distances, index, length, min_p, bound, last)
        kept = kept & (bits < below)
        counts += kept.to(tl.int32)
        masses += tl.where(kept, weight, 0.0)
    return tl.sum(counts, 0), tl.sum(masses, 0)


@triton.jit
def _pivot(distances, length, min_p, bound, last, target, COUNTS: tl.constexpr, CHUNK: tl.constexpr):
    """Return the smallest bits such that the kept candidates up to it number or weigh at least `target`.

    Each round halves the interval three times: it sums below 8 pivots (as FlashInfer's search with two, Ye et al.
    2025). A lane has sums of its own until the round ends, because adding those of all lanes takes longer than a chunk.
    Sums of more candidates are not smaller, so the search ends, and exactly at a candidate.
    """
    low, high = bound * 0, bound
    while low < high:
        step = (high - low) // _PIVOTS + 1
        reach = low.to(tl.int64) + (tl.arange(0, _PIVOTS) + 1).to(tl.int64) * step - 1
        pivots = tl.minimum(reach, high.to(tl.int64)).to(tl.int32)
        sums = tl.zeros((_PIVOTS, CHUNK), tl.float32)
        for start in range(0, length, CHUNK):
            index = start + tl.arange(0, CHUNK)
            bits, weight, kept = _kept(distances, index, length, min_p, bound, last)
            if COUNTS:
                weight = tl.zeros_like(weight) + 1
            weight = tl.where(kept, weight, 0.0)
            sums += tl.where(bits[None, :] <= pivots[:, None], weight[None, :], 0.0)
        enough = (tl.sum(sums, 1) >= target) | (pivots == high)
        low = tl.max(tl.where(enough, low, pivots + 1), 0)
        high = tl.min(tl.where(enough, pivots, high), 0)
    return high


@triton.jit
def _last_tie(distances, length, min_p, bound, last, pivot, quota, CHUNK: tl.constexpr):
    """Return the index of the kept candidate that is the `quota`-th with the bits of the pivot, or the last of them."""
    seen, found = length * 0, length * 0 - 1
    for start in range(0, length, CHUNK):
        index = start + tl.arange(0, CHUNK)
        bits, _weight, kept = _kept(distances, index, length, min_p, bound, last)
        tie = kept & (bits == pivot)
        rank = seen + tl.cumsum(tie.to(tl.int32), 0)
        found = tl.maximum(found, tl.max(tl.where(tie & (rank <= quota), index, -1), 0))
        seen += tl.sum(tie.to(tl.int32), 0)
    return found


@triton.jit
def _after_top_k(distances, length, min_p, top_k, CHUNK: tl.constexpr):
    """Return bound and last index of the candidates that min_p and top_k keep. Of equal ones the first are kept."""
    bound, last = length * 0 + _INFINITE, length
    count, _mass = _sums(distances, length, min_p, bound, last, bound + 1, CHUNK)
    if top_k < count:
        pivot = _pivot(distances, length, min_p, bound, last, top_k.to(tl.float32), True, CHUNK)
        count, _mass = _sums(distances, length, min_p, bound, last, pivot, CHUNK)
        last = _last_tie(distances, length, min_p, bound, last, pivot, top_k - count, CHUNK)
        bound = pivot
    return bound, last


@triton.jit
def _after_top_p(distances, length, min_p, bound, last, target, CHUNK: tl.constexpr):
    """Return bound and last index of the candidates that are kept while the likelier ones weigh less than `target`."""
    pivot = _pivot(distances, length, min_p, bound, last, target, False, CHUNK)
    _count, mass = _sums(distances, length, min_p, bound, last, pivot, CHUNK)
    weight = tl.exp(-pivot.to(tl.float32, bitcast=True))
    quota = length
    if weight > 0:
        most = tl.minimum(tl.ceil((target - mass) / weight), length.to(tl.float32))
        quota = tl.maximum(most, 1.0).to(tl.int32)
    return pivot, _last_tie(distances, length, min_p, bound, last, pivot, quota, CHUNK)


@triton.jit
def _winner(words, floats, lengths, totals, distances, tokens, vocabulary, row, CHUNK: tl.constexpr):
    """Return the best kept candidate of a row, packed."""
    place = place_of(words, row)
    length = tl.load(lengths + place)
    distances += place.to(tl.int64) * vocabulary
    tokens += place.to(tl.int64) * vocabulary
    min_p, top_k, top_p = min_p_of(floats, row), top_k_of(words, row), top_p_of(floats, row)
    bound, last = _after_top_k(distances, length, min_p, top_k, CHUNK)
    if top_p < float("inf"):
        total = tl.load(totals + place)
        if (top_k < vocabulary) | (min_p > 0):
            _count, total = _sums(distances, length, min_p, bound, last, bound + 1, CHUNK)
        bound, last = _after_top_p(distances, length, min_p, bound, last, top_p * total, CHUNK)
    best = tl.full((CHUNK,), _NOTHING, tl.int64)
    for start in range(0, length, CHUNK):
        index = start + tl.arange(0, CHUNK)
        _bits, _weight, kept = _kept(distances, index, length, min_p, bound, last)
        token = tl.load(tokens + index, mask=index < length, other=0)
        distance = tl.load(distances + index, mask=index < length, other=0)
        packed = with_token(ordered(gumbel_noise(state_of(words, row), token) - distance), token)
        best = tl.maximum(best, tl.where(kept, packed, _NOTHING))
    return tl.max(best, 0)


@triton.jit
def _best_of_tiles(tops, bests, row, tiles, maximum, temperature, place, TILES: tl.constexpr):
    """Return the best of a row's tiles, packed. Scores of sampled rows are relative to their tile's maximum."""
    tile = tl.arange(0, TILES)
    cells, there = row.to(tl.int64) * tiles + tile, tile < tiles
    packed = tl.load(bests + cells, mask=there, other=_NOTHING)
    if (temperature > 0) & (place < 0):
        key = key_of(packed)
        top = number_of(tl.load(tops + cells, mask=there, other=0))
        shift = tl.div_rn(top - maximum, tl.zeros_like(top) + temperature)
        key = tl.where(top == maximum, key, ordered(number_of(key) + shift))
        packed = tl.where(there, with_token(key, token_of(packed)), _NOTHING)
    return tl.max(packed, 0)


@triton.jit
def choose(
    counts,
    words,
    floats,
    tops,
    bests,
    lengths,
    totals,
    distances,
    tokens,
    results,
    vocabulary,
    tiles,
    FILTERS: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write a row's token to `results`, and count it in the row's slot.

    As on the CPU, a sampled row with NaN gives token 0, and one with infinite logits the first of them.
    """
    row = tl.program_id(0)
    temperature, place = temperature_of(floats, row), place_of(words, row)
    maximum = largest(tops, row, tiles, TILES)
    best = _best_of_tiles(tops, bests, row, tiles, maximum, temperature, place, TILES)
    if FILTERS:  # noqa: SIM102 - the compiler leaves the branch out
        if (place >= 0) & is_finite(maximum):
            best = _winner(words, floats, lengths, totals, distances, tokens, vocabulary, row, CHUNK)
    token = token_of(best)
    if (temperature > 0) & (maximum != maximum):
        token = token * 0
    tl.store(results + row, token.to(tl.int64))
    if advances(words, row):
        count = counts + slot_of(words, row).to(tl.int64) * vocabulary + token
        value = tl.load(count).to(tl.int32)
        if (value & _MAX_COUNT) < _MAX_COUNT:
            tl.store(count, (value + 1).to(tl.int16))
