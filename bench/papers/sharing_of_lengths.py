"""Figure 15's samples by arithmetic: what follows from the lengths of requests and the size of blocks alone."""

from collections.abc import Sequence

from bench.papers.case import Values
from bench.papers.simulation.traces import load


def saved_by_samples(workload: str, widths: Sequence[int], block_size: int) -> Values:
    """Return the blocks saved over those without sharing, by the number of samples, summed over all tokens of outputs.

    n samples behind a prompt of L tokens save (n - 1) floor(L / size) of n ceil((L + t) / size) blocks after t tokens.
    Raises InvalidTrace.
    """
    lengths = load(workload)
    shared = sum(one.prompt // block_size * one.output for one in lengths)
    alone = sum(_blocks(sum(one), block_size) - _blocks(one.prompt, block_size) for one in lengths)
    return {str(width): (width - 1) * shared / (width * alone) for width in widths}


def _blocks(tokens: int, size: int) -> int:
    """Return the sum of ceil(t / size) over t from 1 to `tokens`."""
    whole, rest = divmod(tokens, size)
    return size * whole * (whole + 1) // 2 + rest * (whole + 1)
