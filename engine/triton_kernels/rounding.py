"""Numbers of 16 bits under the interpreter, whose NumPy knows no bfloat16: it would multiply bits, and cut digits off.

On a GPU all of this is nothing, or one conversion.
"""

import triton
import triton.language as tl


@triton.jit
def widened(numbers, INTERPRETED: tl.constexpr):
    """Return what matrix products take: on a GPU the numbers as they are, under the interpreter float32."""
    if INTERPRETED:
        if numbers.dtype == tl.bfloat16:
            bits = numbers.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            return bits.to(tl.float32, bitcast=True)
        else:  # noqa: RET505 - both returns must be seen by the compiler to have their own type
            return numbers.to(tl.float32)
    else:
        return numbers


@triton.jit
def rounded(numbers, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 numbers as another type, rounded to the nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = numbers.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505
        return numbers.to(TYPE)
