"""Noise and order of scores, as on the CPU (engine.run.sampling)."""

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)
_HALF_STEP = tl.constexpr(2.0**-53)
_MAX_UNIFORM = tl.constexpr(1 - 2.0**-24)  # the largest float32 below 1
_MAX_INT = tl.constexpr(0x7FFFFFFF)


@triton.jit
def gumbel_noise(state, token):
    """Return the float32 Gumbel noise of int32 token ids in the row with this int64 state.

    The 64-bit mixer of splitmix64 (Steele et al. 2014); up to the logarithms it has the bits of the CPU's.
    """
    mixed = state.to(tl.uint64) + token.to(tl.uint64) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _FIRST
    mixed = (mixed ^ (mixed >> 27)) * _SECOND
    mixed = mixed ^ (mixed >> 31)
    uniform = (((mixed >> 11).to(tl.int64).to(tl.float64) + 0.5) * _HALF_STEP).to(tl.float32)
    return -tl.log(_exponential(tl.minimum(uniform, _MAX_UNIFORM)))


@triton.jit
def _exponential(uniform):
    """Return -log(1 - uniform), exact to a few units in the last place: small ones give the large noise that wins.

    A GPU's logarithm has an absolute error near 1, so small numbers use 2 atanh(z), z = u / (2 - u), as a series.
    """
    ratio = uniform / (2 - uniform)
    square = ratio * ratio
    series = 2 * ratio * (1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square * (1 / 9)))))
    return tl.where(uniform < 0.25, series, -tl.log(1 - uniform))


@triton.jit
def ordered(number):
    """Return int32 keys in the order of float32 numbers; equal ones have equal keys, and NaN the largest."""
    bits = tl.where(number == 0, 0.0, number).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(number == number, bits ^ ((bits >> 31) & _MAX_INT), _MAX_INT)


@triton.jit
def number_of(key):
    """Return the float32 number of an int32 key, the inverse of `ordered`."""
    return (key ^ ((key >> 31) & _MAX_INT)).to(tl.float32, bitcast=True)


@triton.jit
def with_token(key, token):
    """Return int64 keys whose maximum has the largest key, and of equal ones the smallest token id."""
    return (key.to(tl.int64) << 32) | (token ^ _MAX_INT).to(tl.int64)


@triton.jit
def key_of(packed):
    """Return the int32 key in the result of `with_token`."""
    return (packed >> 32).to(tl.int32)


@triton.jit
def token_of(packed):
    """Return the int32 token id in the result of `with_token`."""
    return (packed & _MAX_INT).to(tl.int32) ^ _MAX_INT
