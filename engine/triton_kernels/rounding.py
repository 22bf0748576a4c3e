"""16-bit numbers under the interpreter, because NumPy has no bfloat16: it would multiply bits and truncate.

On a GPU these functions are no-ops or one conversion.
"""

import triton
import triton.language as tl


@triton.jit
def widened(numbers, INTERPRETED: tl.constexpr):
    """Return the operand of a matrix product: unchanged on a GPU, float32 under the interpreter."""
    if INTERPRETED:
        if numbers.dtype == tl.bfloat16:
            bits = numbers.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            return bits.to(tl.float32, bitcast=True)
        else:  # noqa: RET505 - the compiler needs both branches, because their types differ
            return numbers.to(tl.float32)
    else:
        return numbers


@triton.jit
def rounded(numbers, TYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return float32 numbers as another dtype, rounded to nearest, ties to even."""
    if INTERPRETED and tl.bfloat16 == TYPE:
        bits = numbers.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        return (nearest >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505
        return numbers.to(TYPE)
