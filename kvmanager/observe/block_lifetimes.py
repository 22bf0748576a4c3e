"""Lifetimes and prefix cache hits of a random sample of a pool's blocks.

A lifetime begins when a device block is handed out and ends when it is handed out again: until then its contents are
held or cached. The lifetime of a withheld block has no end and is not observed. The three values are those of vLLM's
KV cache residency metrics, so that pools can be compared.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvmanager.applied import AppliedStep
from kvmanager.effects import Allocated, Extended, SwappedIn, effect_of


class LifetimeSamples(NamedTuple):
    """The lifetime samples of a block step, in seconds.

    For each lifetime that ended: its length in `lifetimes`, and the time since the last grant or hit in `idle`. For
    each hit of a block but its first: the time since the previous hit in `reuse_gaps`.
    """

    lifetimes: list[float]
    idle: list[float]
    reuse_gaps: list[float]


class _Lifetime:
    __slots__ = ("begin", "hit", "last_use")

    def __init__(self, now: float) -> None:
        self.begin = self.last_use = now
        self.hit = False


class BlockLifetimes:
    """Samples the lifetimes that begin from now on in one pool."""

    def __init__(self, share: float, random: Callable[[], float]) -> None:
        """Sample each lifetime with the probability `share`, above 0 and at most 1.

        `random` returns uniform random numbers, at least 0 and below 1.
        """
        self._log_unsampled = math.log1p(-share) if share < 1 else -math.inf
        self._random = random
        self._sampled: dict[int, _Lifetime] = {}  # by block
        self._to_skip = self._random_skip()

    def on_step(self, applied: AppliedStep, now: float) -> LifetimeSamples | None:
        """Receive a block step applied at time `now`, in seconds. Returns None if no block was handed out or hit."""
        if not applied.granted_blocks and not applied.hit_tokens:
            return None
        samples = LifetimeSamples([], [], [])
        copied = {copy.destination for copy in applied.result.host_to_device}
        for effect in map(effect_of, applied.effects):
            match effect:
                case Extended():
                    self._hand_out(effect.blocks, now, samples)
                case Allocated(blocks=blocks, allocation=allocation):
                    hits = blocks[: allocation.hit_blocks]
                    new = self._take_copied(hits, copied)
                    self._hand_out(new, now, samples)
                    self._hit(hits, new, now, samples)
                    self._hand_out(blocks[allocation.hit_blocks :], now, samples)
                case SwappedIn():
                    self._hand_out(self._take_copied(effect.blocks, copied), now, samples)
        return samples

    @staticmethod
    def _take_copied(blocks: Sequence[int], copied: set[int]) -> list[int]:
        """Remove the blocks from `copied`; return those that were in it, in order."""
        if not copied:
            return []
        new = [block for block in blocks if block in copied]
        copied.difference_update(new)
        return new

    def _hand_out(self, blocks: Sequence[int], now: float, samples: LifetimeSamples) -> None:
        if not self._sampled.keys().isdisjoint(blocks):
            for block in self._sampled.keys() & blocks:
                ended = self._sampled.pop(block)
                samples.lifetimes.append(now - ended.begin)
                samples.idle.append(now - ended.last_use)
        position = self._to_skip
        while position < len(blocks):
            self._sampled[blocks[position]] = _Lifetime(now)
            position += 1 + self._random_skip()
        self._to_skip = position - len(blocks)

    def _hit(self, blocks: Sequence[int], new: Sequence[int], now: float, samples: LifetimeSamples) -> None:
        if self._sampled.keys().isdisjoint(blocks):
            return
        for block in (self._sampled.keys() & blocks).difference(new):
            lifetime = self._sampled[block]
            if lifetime.hit:
                samples.reuse_gaps.append(now - lifetime.last_use)
            lifetime.hit, lifetime.last_use = True, now

    def _random_skip(self) -> int:
        """Return the number of lifetimes before the next sampled one, which is geometrically distributed."""
        return int(math.log(1 - self._random()) / self._log_unsampled)
