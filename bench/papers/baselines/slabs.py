"""Contiguous pieces of memory, and how many tokens a system reserves for a sequence."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from bench.loads.memory import Lengths


class Slab(NamedTuple):
    """A contiguous piece of memory, in blocks."""

    start: int
    blocks: int


# Tokens reserved for a sequence of these lengths, prompt included.
Reservation = Callable[[Lengths], int]


def reservations(context_tokens: int) -> Mapping[str, Reservation]:
    """Return the three reservations of Orca by name (section 6.1 of the paper), each at most the model's context.

    `oracle` is the true length, `pow2` has the next power of two of the output, `max` is the whole context.
    """

    def pow2(lengths: Lengths) -> int:
        output = 1 << max(lengths.output - 1, 0).bit_length()
        return min(lengths.prompt + output, context_tokens)

    return {"oracle": sum, "pow2": pow2, "max": lambda _: context_tokens}
