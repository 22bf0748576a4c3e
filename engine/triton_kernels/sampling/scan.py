"""The pass over all logits: penalties, temperature, noise and the maximum of each tile."""

import triton
import triton.language as tl

from engine.triton_kernels.rounding import widened
from engine.triton_kernels.sampling.noise import gumbel_noise, number_of, ordered, with_token

ROW_WORDS = 14  # int32 words of one row's parameters
_WORDS = tl.constexpr(ROW_WORDS)
_NOTHING = tl.constexpr(-(1 << 31))  # below the key of any number
_GENERATED = tl.constexpr(0x7FFF)  # the bits of a count that are the output's


@triton.jit
def temperature_of(floats, row):
    """Return a row's temperature; 0 is greedy."""
    return tl.load(floats + row * _WORDS + 2)


@triton.jit
def top_p_of(floats, row):
    """Return a row's top_p, infinite without this filter."""
    return tl.load(floats + row * _WORDS + 3)


@triton.jit
def min_p_of(floats, row):
    """Return a row's min_p, 0 without this filter."""
    return tl.load(floats + row * _WORDS + 4)


@triton.jit
def top_k_of(words, row):
    """Return a row's top_k, the size of the vocabulary without this filter."""
    return tl.load(words + row * _WORDS + 5)


@triton.jit
def slot_of(words, row):
    """Return the slot of a row's token counts, negative if it has none."""
    return tl.load(words + row * _WORDS + 9)


@triton.jit
def place_of(words, row):
    """Return a row's place among those with filters, negative if it has none."""
    return tl.load(words + row * _WORDS + 11)


@triton.jit
def advances(words, row):
    """Return whether a row's token is added to its slot."""
    return tl.load(words + row * _WORDS + 12) > 0


@triton.jit
def state_of(words, row):
    """Return the int64 state of a row's noise."""
    low = tl.load(words + row * _WORDS).to(tl.uint32, bitcast=True).to(tl.int64)
    return (tl.load(words + row * _WORDS + 1).to(tl.int64) << 32) | low


@triton.jit
def row_logits(logits, changed, counts, words, floats, row, token, vocabulary, stride, INTERPRETED: tl.constexpr):
    """Return float32 logits of a row after its rules, -inf for ids outside the vocabulary."""
    there = token < vocabulary
    source = tl.load(words + row * _WORDS + 10)
    if source >= 0:
        number = tl.load(changed + source.to(tl.int64) * vocabulary + token, mask=there, other=0)
    else:
        number = tl.load(logits + row.to(tl.int64) * stride + token, mask=there, other=0)
        number = widened(number, INTERPRETED).to(tl.float32)
    slot = slot_of(words, row)
    if slot >= 0:
        count = tl.load(counts + slot.to(tl.int64) * vocabulary + token, mask=there, other=0).to(tl.int32)
        number = _penalized(number, count, floats + row * _WORDS + 6)
    return tl.where(there, number, float("-inf"))


@triton.jit
def _penalized(number, count, penalties):
    """Apply repetition, frequency and presence penalties, rounded after each operation as on the CPU."""
    repetition = tl.load(penalties)
    known = tl.where(number > 0, tl.div_rn(number, tl.zeros_like(number) + repetition), number * repetition)
    number = tl.where(count != 0, known, number)
    generated = count & _GENERATED
    number = number - generated.to(tl.float32) * tl.load(penalties + 1)
    return number - tl.where(generated > 0, tl.load(penalties + 2), 0.0)


@triton.jit
def scaled(number, maximum, temperature):
    """Return (number - maximum) / temperature, rounded as on the CPU; -inf stays -inf."""
    quotient = tl.div_rn(number - maximum, tl.zeros_like(number) + temperature)
    return tl.where(number == float("-inf"), number, quotient)


@triton.jit
def scan(
    logits,
    changed,
    counts,
    words,
    floats,
    tops,
    bests,
    vocabulary,
    stride,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Write each tile's largest key to `tops`, and to `bests` its best token, packed with its key.

    That is the likeliest token of a greedy row or one with filters, and the winner of the noise otherwise, whose score
    is relative to the tile's maximum.
    """
    tile, row = tl.program_id(0), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    number = row_logits(logits, changed, counts, words, floats, row, token, vocabulary, stride, INTERPRETED)
    key = tl.where(token < vocabulary, ordered(number), _NOTHING)
    top = tl.max(key, 0)
    temperature = temperature_of(floats, row)
    if (temperature > 0) & (place_of(words, row) < 0):
        score = scaled(number, number_of(top), temperature) + gumbel_noise(state_of(words, row), token)
        key = tl.where(token < vocabulary, ordered(score), _NOTHING)
    place = row.to(tl.int64) * tl.num_programs(0) + tile
    tl.store(tops + place, top)
    tl.store(bests + place, tl.max(with_token(key, token), 0))
