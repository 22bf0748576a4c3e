"""The result of a block step: the answer to its engine, and the records that stay in the KV manager."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from blocks import Copy, Refusal, StepResult, TableChange
from kvmanager.effects import RawEffect
from kvmanager.tier.tier import BlockCounts, Eviction, Seal


class AppliedStep(NamedTuple):
    """An applied block step.

    `device` and `host` are the block counts after it. `sealed_blocks` of the device have got the keys `sealed_keys`;
    `host_sealed` has both for the host tier. `evicted` are the device blocks whose contents were evicted. `windows` has
    the same for each window kind, with its own effects.
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
    windows: "tuple[AppliedStep, ...]" = ()

    @property
    def sealed(self) -> list[Seal]:
        """The device blocks that have got keys, in order."""
        return list(map(Seal, self.sealed_blocks, self.sealed_keys))

    @property
    def evicted_blocks(self) -> int:
        """Number of evicted device blocks."""
        return len(self.evicted)


@dataclass(slots=True)
class Outcome:
    """The result of a block step so far: the verbs append to it, and `applied` returns it at the end."""

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
    windows: "list[Outcome]" = field(default_factory=list)

    def applied(
        self,
        step: int,
        device: BlockCounts,
        host: BlockCounts,
        withheld: tuple[list[int], list[int]],
        windows: tuple[AppliedStep, ...] = (),
    ) -> AppliedStep:
        """Return the result of the block step with this number, after its last item."""
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
            tuple([window.result for window in windows]),
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
            windows,
        )
