"""How long the blocks of a pool live, and how often they are found again: for a random sample of them.

A life begins when a device block is handed out and ends when it is handed out again: until then its contents are there,
held or cached. The three figures are those of vLLM's KV cache residency metrics, so that pools can be compared.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmanager.applied import AppliedStep
from kvmanager.effects import Allocated, Extended, SwappedIn, effect_of


class LifetimeSamples(NamedTuple):
    """What a Step says of lifetimes, in seconds.

    Of each life that ended: how long it was, and how long before its end the block was last handed out or found. Of
    each block that was found in the prefix cache, unless for the first time in its life: how long after the last time.
    """

    lifetimes: list[float]
    idle: list[float]
    reuse_gaps: list[float]


class _Life:
    __slots__ = ("begun", "found", "touched")

    def __init__(self, now: float) -> None:
        self.begun = self.touched = now
        self.found = False


class BlockLifetimes:
    """Follows a random sample of the lives that begin from now on in one pool."""

    def __init__(self, share: float, draw: Callable[[], float]) -> None:
        """Each life is followed with the probability `share`, above 0 and at most 1.

        `draw` gives random numbers from 0 up to 1, each alike.
        """
        self._log_unfollowed = math.log1p(-share) if share < 1 else -math.inf
        self._draw = draw
        self._lives: dict[int, _Life] = {}  # by block
        self._to_skip = self._drawn_skip()

    def on_step(self, applied: AppliedStep, now: float) -> LifetimeSamples | None:
        """Receive a Step that was applied at a moment, in seconds. None: no block was handed out or found."""
        if not applied.granted_blocks and not applied.hit_tokens:
            return None
        observed = LifetimeSamples([], [], [])
        brought_back = {copy.destination for copy in applied.result.host_to_device}
        for effect in map(effect_of, applied.effects):
            match effect:
                case Extended():
                    self._hand_out(effect.blocks, now, observed)
                case Allocated(blocks=blocks, allocation=allocation):
                    found = blocks[: allocation.hit_blocks]
                    new = self._new(found, brought_back)
                    self._hand_out(new, now, observed)
                    self._find(found, new, now, observed)
                    self._hand_out(blocks[allocation.hit_blocks :], now, observed)
                case SwappedIn():
                    self._hand_out(self._new(effect.blocks, brought_back), now, observed)
        return observed

    @staticmethod
    def _new(blocks: Sequence[int], brought_back: set[int]) -> list[int]:
        """Take out of `brought_back` those of the blocks that are in it, and return them in their order."""
        if not brought_back:
            return []
        new = [block for block in blocks if block in brought_back]
        brought_back.difference_update(new)
        return new

    def _hand_out(self, blocks: Sequence[int], now: float, observed: LifetimeSamples) -> None:
        if not self._lives.keys().isdisjoint(blocks):
            for block in self._lives.keys() & blocks:
                life = self._lives.pop(block)
                observed.lifetimes.append(now - life.begun)
                observed.idle.append(now - life.touched)
        position = self._to_skip
        while position < len(blocks):
            self._lives[blocks[position]] = _Life(now)
            position += 1 + self._drawn_skip()
        self._to_skip = position - len(blocks)

    def _find(self, blocks: Sequence[int], new: Sequence[int], now: float, observed: LifetimeSamples) -> None:
        if self._lives.keys().isdisjoint(blocks):
            return
        for block in (self._lives.keys() & blocks).difference(new):
            life = self._lives[block]
            if life.found:
                observed.reuse_gaps.append(now - life.touched)
            life.found, life.touched = True, now

    def _drawn_skip(self) -> int:
        """Draw how many lives are not followed before the next one that is: geometric."""
        return int(math.log(1 - self._draw()) / self._log_unfollowed)
