"""Memory that outlives a simulated process: seals and digests of both tiers, and who may write to it.

Each store is checked, so that a kill between any two of them is: a sealed block is never written to, and a block that
is sealed has the digests of its key.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

import torch

from engine.kept.kept_memory import KeptIdentity, KeptKind, KeptMemory, KindMemory, kept_bytes
from engine.kept.seals import Sealing, Seals, SealState
from kvmanager import Pool, PoolState
from simulation.invariants.expected_contents import ExpectedContents
from simulation.invariants.violation import Violation


class Owner(Protocol):
    """A process that writes to the memory."""

    @property
    def pool(self) -> Pool:
        """The replica of its pool."""

    @property
    def all_written(self) -> bool:
        """Whether it has written everything that the replica has applied."""


class KilledInside(BaseException):
    """The process is killed between two of its stores."""


class SharedMemory:
    """The memory of one engine id. One process has it at a time, as the lock of a file has one owner."""

    def __init__(self, size: Any, expected: ExpectedContents, random: Random, kills: float) -> None:
        """Start empty, of an EngineSize. After a store, its process is killed with probability `kills`."""
        kinds = [("all", size.device_blocks, size.host_blocks)]
        kinds += [(kind.name, kind.device_blocks, kind.host_blocks) for kind in size.windows]
        identity = KeptIdentity(
            fingerprint="simulated",
            boot_id="simulated",
            backend="digests",
            dtype="int64",
            block_size=size.block_size,
            kinds=tuple([KeptKind(name, "digests", 2 * size.block_size, *blocks) for name, *blocks in kinds]),
        )
        self.expected = expected
        self.owner: Owner | None = None
        self.adopted = 0  # blocks that a process has found
        self.kills = kills
        self._random = random
        self.block_size = size.block_size
        self.kept = KeptMemory.mapped(memoryview(bytearray(kept_bytes(identity))), identity)
        self.kinds = [SharedKind(self, kind) for kind in self.kept.kinds]

    def check_all(self) -> None:
        """Check what a process finds. Raises Violation."""
        for kind in self.kinds:
            kind.check_all()

    def check_complete(self, pool: Pool) -> None:
        """Check that a process finds all that the replica of its predecessor had, `pool`. Raises Violation."""
        resets = self.kept.counters.resets
        if pool.state.resets != resets:
            raise Violation(f"{pool.state.resets} resets are kept as {resets}")
        for kind, state in zip(self.kinds, pool.state.kinds, strict=True):
            kind.check_complete(state)

    def tick(self) -> None:
        """Pass between two stores. Raises KilledInside."""
        if self.kills and self._random.random() < self.kills:
            raise KilledInside


class SharedKind:
    """The blocks of one kind of a shared memory."""

    def __init__(self, shared: SharedMemory, kept: KindMemory) -> None:
        self._shared = shared
        self._kept = kept
        kept.device = _CheckedSeals(shared, kept.device, self, self.device)
        kept.host = _CheckedSeals(shared, kept.host, self, self.host)

    @property
    def device(self) -> torch.Tensor:
        """The digests of the device: `[blocks + 1, block_size]` int64."""
        return self._kept.cache[:, : self._shared.block_size]

    @property
    def host(self) -> torch.Tensor:
        """The digests of the host tier."""
        if self._kept.host_cache is None:
            return torch.zeros(1, self._shared.block_size)
        return self._kept.host_cache[:, : self._shared.block_size]

    def stored(self, blocks: Sequence[int], *, host: bool) -> None:
        """Check blocks that were written to. Raises Violation, and KilledInside."""
        seals = self._kept.host if host else self._kept.device
        for block in blocks:
            if block and seals.state(block) is SealState.SEALED:
                raise Violation(f"block {block} is written to, although its seal is not broken")
        self._shared.tick()

    def check(self, seals: Seals, digests: torch.Tensor, block: int) -> None:
        """Check a block that was sealed. Raises Violation."""
        sealing = seals.sealing(block)
        if sealing is None or sealing.resets != self._shared.kept.counters.resets:
            return
        shared = self._shared
        held, expected = tuple(digests[block].tolist()), shared.expected.of_key(shared.block_size, sealing.key)
        if held != expected:
            raise Violation(f"block {block} is sealed, but contains {held} in place of {expected}")

    def check_all(self) -> None:
        """Check what a process finds. Raises Violation."""
        for seals, digests in ((self._kept.device, self.device), (self._kept.host, self.host)):
            for block in range(1, len(seals) + 1):
                self.check(seals, digests, block)

    def check_complete(self, state: PoolState) -> None:
        """Check that a process finds all blocks that the replica of its predecessor had. Raises Violation."""
        for tier, seals in ((state.device, self._kept.device), (state.host, self._kept.host)):
            withheld = [block for block in range(1, tier.total + 1) if tier.marks.is_withheld_or_marked(block)]
            if withheld != seals.withheld():
                raise Violation(f"the withheld blocks {withheld} are kept as {seals.withheld()}")
            for key, block in tier.keys.entries():
                if (sealing := seals.sealing(block)) is None or sealing.key != key:
                    raise Violation(f"block {block} has a key, but is not kept")


class _CheckedSeals(Seals):
    """Seals each of whose changes is checked."""

    def __init__(self, shared: SharedMemory, seals: Seals, kind: SharedKind, digests: torch.Tensor) -> None:
        self.__dict__.update(seals.__dict__)
        self._shared, self._kind, self._digests = shared, kind, digests

    def open(self, blocks: Sequence[int]) -> None:
        super().open(blocks)
        self._shared.tick()

    def seal(self, block: int, sealing: Sealing) -> None:
        super().seal(block, sealing)
        self._kind.check(self, self._digests, block)
        self._shared.tick()

    def hold(self, blocks: Sequence[int]) -> None:
        super().hold(blocks)
        self._shared.tick()

    def release(self, blocks: Sequence[int], stamp: int) -> None:
        super().release(blocks, stamp)
        self._shared.tick()

    def withhold(self, blocks: Sequence[int]) -> None:
        super().withhold(blocks)
        self._shared.tick()
