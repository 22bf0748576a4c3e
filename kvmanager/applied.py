"""What a Step did to a pool: the answer for its engine, and all that only the core keeps of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blocks import Copy, Refusal, StepResult, TableChange
from kvmanager.effects import RawEffect
from kvmanager.tier.tier import BlockCounts, Eviction, Seal


class AppliedStep(NamedTuple):
    """A Step that was applied.

    `device` and `host` count the blocks after it. `sealed_blocks` of the device were given `sealed_keys`, `host_sealed`
    those of the host; `evicted` device blocks lost their keys because their space was needed.
    """

    result: StepResult
    effects: Sequence[RawEffect]
    device: BlockCounts
    host: BlockCounts
    sealed_blocks: Sequence[int]
    sealed_keys: Sequence[bytes]
    host_sealed: Sequence[Seal]
    evicted: Sequence[Eviction]
    granted_blocks: int
    hit_tokens: int
    query_tokens: int

    @property
    def sealed(self) -> list[Seal]:
        """The device blocks that were given a key, in this order."""
        return list(map(Seal, self.sealed_blocks, self.sealed_keys))

    @property
    def evicted_blocks(self) -> int:
        """How many keyed device blocks lost their keys because their space was needed."""
        return len(self.evicted)


@dataclass(slots=True)
class Outcome:
    """What a Step has done so far. The verbs write in it, and `applied` is made of it once at the end."""

    refusals: list[Refusal] = field(default_factory=list)
    tables: list[TableChange] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    device_to_host: list[Copy] = field(default_factory=list)
    host_to_device: list[Copy] = field(default_factory=list)
    effects: list[RawEffect] = field(default_factory=list)
    sealed_blocks: list[int] = field(default_factory=list)
    sealed_keys: list[bytes] = field(default_factory=list)
    host_sealed: list[Seal] = field(default_factory=list)
    evicted: list[Eviction] = field(default_factory=list)
    granted_blocks: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0

    def applied(
        self, step: int, device: BlockCounts, host: BlockCounts, withheld: tuple[list[int], list[int]]
    ) -> AppliedStep:
        """Return what the Step of this number did, at its end."""
        result = StepResult(
            step,
            tuple(self.refusals),
            tuple(self.tables),
            tuple(self.copies),
            device.available,
            host.available,
            tuple(self.device_to_host),
            tuple(self.host_to_device),
            tuple(withheld[0]),
            tuple(withheld[1]),
        )
        return AppliedStep(
            result,
            self.effects,
            device,
            host,
            self.sealed_blocks,
            self.sealed_keys,
            self.host_sealed,
            self.evicted,
            self.granted_blocks,
            self.hit_tokens,
            self.query_tokens,
        )
