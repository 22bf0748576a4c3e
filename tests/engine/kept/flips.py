"""Flips bits of blocks and seals where no step reads them, and checks that no token comes from a flipped one.

Answers are those of the same model without flips, whose near ties differ by what a batch contains; so prompts are
answered one after the other in float32, except where requests must be swapped out.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocks import Condemn, Step
from engine.kept.seals import SEAL
from engine.schedule.limits import Preemption
from kvmanager import AppliedStep
from tests.engine.kept.sealed_engine import SealedEngine

BLOCK_SIZE = 4
MAX_TOKENS = 6
_PREFIXES = (8, 12, 20)
_PROMPT = 30
# Of the pool: two requests of the longest prompt do not fit, so that some are swapped out.
_SMALL_POOL: dict[str, Any] = {"device_blocks": 24, "host_blocks": 64, "preemption": Preemption.SWAP}
_PROMPT_COUNT = 6
_SWAP_PROMPTS = 4


@dataclass
class Flips:
    """Flipped blocks of a pool, those that a table or a copy reached afterwards, and those that were condemned.

    `count` and `found` are the numbers of flips, and of those that were reached, in all pools.
    """

    flipped: set[tuple[int, bool, int]] = field(default_factory=set)
    reached: set[tuple[int, bool, int]] = field(default_factory=set)
    condemned: set[tuple[int, bool, int]] = field(default_factory=set)
    unwritten: set[tuple[int, bool, int]] = field(default_factory=set)  # whose copies the engine has not made
    count: int = 0
    found: int = 0

    def begin(self) -> None:
        """Follow another pool."""
        for blocks in (self.flipped, self.reached, self.condemned, self.unwritten):
            blocks.clear()

    def add(self, kind: int, host: bool, block: int) -> None:
        self.flipped.add((kind, host, block))
        self.count += 1

    def observe(self, step: Step, applied: AppliedStep) -> None:
        """Follow what is hit, copied to the device, granted anew and condemned."""
        self.unwritten.clear()
        for item in step.condemns:
            self._condemn(item)
        cached = {item.sequence for item in step.allocates}
        for kind, own in enumerate((applied, *applied.windows)):
            result = own.result
            for copy in result.host_to_device:
                self._reach(kind, True, copy.source)
            copied = {copy.destination for copy in result.host_to_device}
            for change in result.tables:
                hits = applied_hits(applied, change.sequence, change.first_index) if change.sequence in cached else 0
                for place, block in enumerate(change.block_ids):
                    if place < hits and block not in copied:
                        self._reach(kind, False, block)
                    else:
                        self.flipped.discard((kind, False, block))
            written = {(kind, True, copy.destination) for copy in result.device_to_host}
            self.flipped -= written
            self.unwritten |= written

    def _condemn(self, item: Condemn) -> None:
        self.condemned.update((item.kind, item.host, block) for block in item.blocks)

    def _reach(self, kind: int, host: bool, block: int) -> None:
        if (kind, host, block) in self.flipped:
            self.reached.add((kind, host, block))

    def check(self) -> None:
        """Check that all that were reached were condemned."""
        assert self.reached <= self.condemned, self.reached - self.condemned
        self.found += len(self.reached)


def applied_hits(applied: AppliedStep, sequence: int, first: int) -> int:
    """Return how many of the first entries of a new table were hits."""
    cached = next(change.cached_tokens for change in applied.result.tables if change.sequence == sequence)
    return max(0, cached // BLOCK_SIZE - first)


def prompts_of(source: random.Random, count: int) -> list[list[int]]:
    """Return prompts of which some begin alike."""
    base = [source.randrange(3, 380) for _ in range(_PROMPT)]
    return [
        base[: source.choice(_PREFIXES)] + [source.randrange(3, 380) for _ in range(source.randrange(4, 12))]
        for _ in range(count)
    ]


def between_lives(
    made: type[SealedEngine], folder: Path, seed: int, rounds: int, *, seals: bool = False, **sizes: Any
) -> Flips:
    """Flip bits of what a dead engine left, in `rounds` lives of one memory; return what became of them."""
    source = random.Random(seed)
    prompts = prompts_of(source, _PROMPT_COUNT)
    sizes = {"block_size": BLOCK_SIZE, "device_blocks": 96, "token_budget": 32} | sizes
    engine = made(folder, **sizes)
    expected = [engine.generate([prompt], MAX_TOKENS)[0] for prompt in prompts]
    flips = Flips()
    for _ in range(rounds):
        memory = engine.memory
        assert memory is not None
        flips.begin()
        for kind, own in enumerate(memory.kinds):
            sealed = engine.sealed(kind)
            for block in source.sample(sealed, min(len(sealed), 4)):
                flips.add(kind, False, block)
                if seals:
                    row = own.device._seals[block : block + 1].view("u1")
                    row[source.randrange(SEAL.itemsize)] ^= 1 << source.randrange(8)
                else:
                    engine.flip(source, block, kind)
        engine = made(folder, memory, observe=flips.observe, **sizes)
        answers = [engine.generate([prompt], MAX_TOKENS)[0] for prompt in prompts]
        assert answers == expected
        if not seals:
            flips.check()
        if engine.blocks.pool.device.counts.withheld > 40:  # a memory of its own for the rest
            engine = made(folder, **sizes)
            assert [engine.generate([prompt], MAX_TOKENS)[0] for prompt in prompts] == expected
    return flips


def on_the_host(made: type[SealedEngine], folder: Path, seed: int, count: int, **sizes: Any) -> Flips:
    """Flip bits of host blocks while groups are swapped out; return what became of them."""
    source = random.Random(seed)
    prompts = [[source.randrange(3, 380) for _ in range(_PROMPT)] for _ in range(_SWAP_PROMPTS)]
    sizes = {"block_size": BLOCK_SIZE, "token_budget": 32} | _SMALL_POOL | sizes
    expected = made(folder, **sizes).generate(prompts, 4 * MAX_TOKENS)
    flips = Flips()
    while flips.count < count:
        engine = made(folder, observe=flips.observe, **sizes)
        flips.begin()
        ids = [engine.submit(prompt, 4 * MAX_TOKENS) for prompt in prompts]
        while not engine.scheduler.empty:
            engine.turn()
            _flip_host_blocks(engine, source, flips)
        assert [engine.tokens[one] for one in ids] == expected
        assert engine.scheduler.totals.swapped_tokens, "none was swapped out"
        flips.check()
    return flips


def _flip_host_blocks(engine: SealedEngine, source: random.Random, flips: Flips) -> None:
    for kind, state in enumerate(engine.blocks.pool.state.kinds):
        used = [block for block in range(1, state.host.total + 1) if state.host.ref_count(block)]
        used += engine.sealed(kind, host=True)
        for block in source.sample(used, min(len(used), 1)):
            if (kind, True, block) not in flips.flipped | flips.condemned | flips.unwritten and source.random() < 0.3:
                engine.flip(source, block, kind, host=True)
                flips.add(kind, True, block)
