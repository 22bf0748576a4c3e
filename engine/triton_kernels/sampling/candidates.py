"""Candidates of rows with filters: the likeliest tokens, few but enough to decide which tokens the filters keep.

Instead of a sort, one pass measures how many tokens, and how much of the probability, lie within some distances of the
maximum; a second one lists the tokens within the shortest distance that is enough. If none is, all tokens are listed.
"""

import triton
import triton.language as tl

from engine.triton_kernels.sampling.noise import number_of
from engine.triton_kernels.sampling.scan import (
    ROW_WORDS,
    min_p_of,
    place_of,
    row_logits,
    scaled,
    temperature_of,
    top_k_of,
    top_p_of,
)

CUTS = 8
_CUTS = tl.constexpr(CUTS)
_MARGIN = tl.constexpr(1 + 2.0**-16)  # more than the rounding error of a sum of probabilities
_WORDS = tl.constexpr(ROW_WORDS)
_NOTHING = tl.constexpr(-(1 << 31))


@triton.jit
def distance_of_cut(number):
    """Return the distance of a cut from the maximum, in scaled logits: 0.75 to 12.75, then infinite."""
    steps = number.to(tl.float32)
    return tl.where(number == _CUTS - 1, float("inf"), 0.75 + steps * (1.1 + 0.15 * steps))


@triton.jit
def largest(tops, row, tiles, TILES: tl.constexpr):
    """Return the largest logit of a row."""
    tile = tl.arange(0, TILES)
    keys = tl.load(tops + row.to(tl.int64) * tiles + tile, mask=tile < tiles, other=_NOTHING)
    return number_of(tl.max(keys, 0))


@triton.jit
def is_finite(number):
    """Return whether a number is neither infinite nor NaN."""
    return tl.abs(number) < float("inf")


@triton.jit
def bound_spread(
    logits,
    changed,
    counts,
    words,
    floats,
    tops,
    vocabulary,
    stride,
    tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Raise the min_p of a row to the chance of a token n standard deviations of its finite logits below the largest.

    So it keeps the tokens that top_n_sigma keeps (Tang et al. 2024).
    """
    row = tl.program_id(0)
    sigmas = tl.load(floats + row * _WORDS + 13)
    maximum = largest(tops, row, tiles, TILES)
    if (sigmas > 0) & is_finite(maximum):
        temperature = temperature_of(floats, row)
        count, total = tl.zeros((), tl.int32), tl.zeros((), tl.float32)
        for start in range(0, vocabulary, TILE):
            token = start + tl.arange(0, TILE)
            number = row_logits(logits, changed, counts, words, floats, row, token, vocabulary, stride, INTERPRETED)
            distance = -scaled(number, maximum, temperature)
            finite = is_finite(distance)
            count += tl.sum(finite.to(tl.int32), 0)
            total += tl.sum(tl.where(finite, distance, 0.0), 0)
        mean, squares = total / count.to(tl.float32), tl.zeros((), tl.float32)
        for start in range(0, vocabulary, TILE):
            token = start + tl.arange(0, TILE)
            number = row_logits(logits, changed, counts, words, floats, row, token, vocabulary, stride, INTERPRETED)
            distance = -scaled(number, maximum, temperature)
            difference = tl.where(is_finite(distance), distance - mean, 0.0)
            squares += tl.sum(difference * difference, 0)
        least = tl.exp(-sigmas * tl.sqrt(squares / count.to(tl.float32)))
        tl.store(floats + row * _WORDS + 4, tl.maximum(min_p_of(floats, row), least))


@triton.jit
def measure(
    logits,
    changed,
    counts,
    words,
    floats,
    tops,
    within,
    masses,
    vocabulary,
    stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write how many tokens of a tile are within each cut, and the sum of their weights exp(scaled logit)."""
    tile, row, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    place = place_of(words, row)
    maximum = largest(tops, row, tiles, TILES)
    if (place >= 0) & is_finite(maximum):
        token = tile * TILE + tl.arange(0, TILE)
        number = row_logits(logits, changed, counts, words, floats, row, token, vocabulary, stride, INTERPRETED)
        distance = -scaled(number, maximum, temperature_of(floats, row))
        weight = tl.exp(-distance)
        for cut in tl.static_range(_CUTS):
            inside = (token < vocabulary) & (distance <= distance_of_cut(tl.full((), cut, tl.int32)))
            target = (place.to(tl.int64) * _CUTS + cut) * tiles + tile
            tl.store(within + target, tl.sum(inside.to(tl.int32), 0))
            tl.store(masses + target, tl.sum(tl.where(inside, weight, 0.0), 0))


@triton.jit
def _enough(within, masses, top_k, top_p, min_p, vocabulary):
    """Return for each cut whether its tokens decide the filters; `within` and `masses` are its sums of all tiles."""
    cut = tl.arange(0, _CUTS)
    last = cut == _CUTS - 1
    outside = tl.exp(-distance_of_cut(cut)) * _MARGIN
    enough = last | (within >= top_k) | (outside < min_p)
    total = tl.sum(tl.where(last, masses, 0.0), 0)
    # With other filters, top_p is a share of what they keep, which is not known yet.
    target = tl.where((top_k >= vocabulary) & (min_p <= 0), top_p * total * _MARGIN, float("inf"))
    return enough | (masses >= target)


@triton.jit
def gather(
    logits,
    changed,
    counts,
    words,
    floats,
    tops,
    within,
    masses,
    lengths,
    totals,
    distances,
    tokens,
    vocabulary,
    stride,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """List the candidates of a tile, in the order of their ids: distance from the maximum, and token id.

    The first tile's program also writes the length of the row's list, and the sum of all weights of the row.
    """
    tile, row, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    place = place_of(words, row)
    maximum = largest(tops, row, tiles, TILES)
    if (place >= 0) & is_finite(maximum):
        cut, column = tl.arange(0, _CUTS)[:, None], tl.arange(0, TILES)[None, :]
        cells = (place.to(tl.int64) * _CUTS + cut) * tiles + column
        found = tl.load(within + cells, mask=column < tiles, other=0)
        mass = tl.sum(tl.load(masses + cells, mask=column < tiles, other=0), 1)
        number_within = tl.sum(found, 1)
        enough = _enough(
            number_within, mass, top_k_of(words, row), top_p_of(floats, row), min_p_of(floats, row), vocabulary
        )
        chosen = tl.min(tl.where(enough, tl.arange(0, _CUTS), _CUTS), 0)
        start = tl.sum(tl.sum(tl.where((cut == chosen) & (column < tile), found, 0), 1), 0)
        mine = tl.sum(tl.sum(tl.where((cut == chosen) & (column == tile), found, 0), 1), 0)
        if tile == 0:
            tl.store(lengths + place, tl.sum(tl.where(tl.arange(0, _CUTS) == chosen, number_within, 0), 0))
            tl.store(totals + place, tl.sum(tl.where(tl.arange(0, _CUTS) == _CUTS - 1, mass, 0.0), 0))
        if mine > 0:
            token = tile * TILE + tl.arange(0, TILE)
            number = row_logits(logits, changed, counts, words, floats, row, token, vocabulary, stride, INTERPRETED)
            distance = -scaled(number, maximum, temperature_of(floats, row))
            inside = (token < vocabulary) & (distance <= distance_of_cut(chosen))
            target = place.to(tl.int64) * vocabulary + start + tl.cumsum(inside.to(tl.int32), 0) - 1
            tl.store(distances + target, distance, mask=inside)
            tl.store(tokens + target, token, mask=inside)
