"""Figure 16 without Quire: what the paper's definitions give in a few dozen lines.

Nothing but the durations of steps and the lengths of requests is common with the simulations of the product. Requests
wait always, so the finished ones per second are what a system sustains.
"""

import random
from collections.abc import Sequence
from typing import Any

from bench.loads.memory import Lengths
from bench.papers.simulation.cost_model import CostModel, StepLoad, fit_of
from bench.papers.simulation.traces import load

_STEP_TOKENS, _ORCA_SEQUENCES, _WATERMARK = 2_560, 256, 0.01


def alone(model: str, device: str, ranks: int, blocks: int, block_size: int, cost: str, prefix: int, ended: int) -> Any:
    """Return the rate, in requests per second, that each system sustains with this prefix. Raises InvalidTrace."""
    assert cost == "fit", "the sentences are translated by a model whose steps were measured"
    lengths, fit = load("translation"), fit_of(model, device, ranks)
    return {
        system: _Server(lengths, prefix, fit, blocks, block_size, paged=system == "paged").requests_per_second(ended)
        for system in ("paged", "oracle")
    }


class _Live:
    """A request: its tokens so far, those at its end, and the blocks that it alone holds."""

    def __init__(self, lengths: Lengths, prefix: int) -> None:
        self.tokens = prefix + lengths.prompt
        self.end = self.tokens + lengths.output
        self.blocks = 0


class _Server:
    """A paged server, on which the whole blocks of the prefix exist once and are computed once, or Orca (Oracle).

    The paged one grants blocks as tokens come; at a shortage the last request gives up its blocks, and waits first.
    Orca reserves the next power of two of the blocks of a request's end, of which none is lost to fragmentation here.
    """

    def __init__(
        self, lengths: Sequence[Lengths], prefix: int, cost: CostModel, blocks: int, block_size: int, *, paged: bool
    ) -> None:
        self._lengths, self._prefix, self._cost = lengths, prefix, cost
        self._block_size, self._paged = block_size, paged
        self._shared = prefix // block_size if paged else 0
        self._free = blocks - self._shared
        self._watermark = int(_WATERMARK * blocks) if paged else 0
        self._draw = random.Random(0)
        self._live: list[_Live] = []
        self._waiting: list[_Live] = []

    def requests_per_second(self, ended: int) -> float:
        """Serve `ended` requests; return those per second after the first quarter."""
        finished, seconds, begun = 0, 0.0, 0.0
        while finished < ended:
            if self._paged:
                self._grow()
            decoding, context = len(self._live), sum(one.tokens for one in self._live)
            seconds += self._cost.seconds(StepLoad(decoding, context, *self._admit(decoding)))
            over = self._advance()
            if finished < ended // 4 <= finished + over:
                begun = seconds
            finished += over
        return (finished - ended // 4) / (seconds - begun)

    def _needed(self, one: _Live) -> int:
        if self._paged:
            return -(-(one.tokens + 1) // self._block_size) - self._shared
        return 1 << (-(-one.end // self._block_size) - 1).bit_length()

    def _grow(self) -> None:
        for one in list(self._live):
            while one in self._live and self._needed(one) - one.blocks > self._free:
                victim = self._live.pop()
                self._free, victim.blocks = self._free + victim.blocks, 0
                self._waiting.insert(0, victim)
            if one in self._live:
                self._grant(one)

    def _grant(self, one: _Live) -> None:
        self._free, one.blocks = self._free - (self._needed(one) - one.blocks), self._needed(one)

    def _admit(self, decoding: int) -> tuple[int, int]:
        """Admit what fits; return its prompt tokens, and the sum of the differences of squares of their ends."""
        cached, tokens, squares = self._shared * self._block_size, 0, 0
        while self._paged or len(self._live) < _ORCA_SEQUENCES:
            one = self._waiting.pop(0) if self._waiting else _Live(self._draw.choice(self._lengths), self._prefix)
            computed = one.tokens - cached
            if self._needed(one) + self._watermark > self._free or decoding + tokens + computed > _STEP_TOKENS:
                self._waiting.insert(0, one)
                break
            self._grant(one)
            self._live.append(one)
            tokens, squares = tokens + computed, squares + one.tokens**2 - cached**2
        return tokens, squares

    def _advance(self) -> int:
        """Add a token to each request; return how many ended."""
        for one in self._live:
            one.tokens += 1
        over = [one for one in self._live if one.tokens >= one.end]
        self._free += sum(one.blocks for one in over)
        self._live = [one for one in self._live if one.tokens < one.end]
        return len(over)
