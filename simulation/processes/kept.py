"""Memory that outlives a simulated process: seals and digests of both tiers, and who may write to it.

Each store is checked, so that a kill between any two of them is: a sealed block is never written to, and a block that
is sealed has the digests of its key.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

import torch

from engine.kept.kept_memory import KeptIdentity, KeptMemory, kept_bytes
from engine.kept.seals import Sealing, Seals, SealState
from kvmanager import Pool
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
        identity = KeptIdentity(
            fingerprint="simulated",
            boot_id="simulated",
            backend="digests",
            dtype="int64",
            shapes="digests",
            block_elements=2 * size.block_size,
            block_size=size.block_size,
            device_blocks=size.device_blocks,
            host_blocks=size.host_blocks,
        )
        self.expected = expected
        self.owner: Owner | None = None
        self.adopted = 0  # blocks that a process has found
        self.kills = kills
        self._random = random
        self._block_size = size.block_size
        bytes_ = memoryview(bytearray(kept_bytes(identity)))
        self.kept = KeptMemory(bytes_, identity)
        self.kept.device = _CheckedSeals(self, self.kept.device, self.device)
        self.kept.host = _CheckedSeals(self, self.kept.host, self.host)

    @property
    def device(self) -> torch.Tensor:
        """The digests of the device: `[blocks + 1, block_size]` int64."""
        return self.kept.cache[:, : self._block_size]

    @property
    def host(self) -> torch.Tensor:
        """The digests of the host tier."""
        return (
            torch.zeros(1, self._block_size)
            if self.kept.host_cache is None
            else self.kept.host_cache[:, : self._block_size]
        )

    def stored(self, blocks: Sequence[int], *, host: bool) -> None:
        """Check blocks that were written to. Raises Violation, and KilledInside."""
        seals = self.kept.host if host else self.kept.device
        for block in blocks:
            if block and seals.state(block) is SealState.SEALED:
                raise Violation(f"block {block} is written to, although its seal is not broken")
        self.tick()

    def check(self, seals: Seals, digests: torch.Tensor, block: int) -> None:
        """Check a block that was sealed. Raises Violation."""
        sealing = seals.sealing(block)
        if sealing is None or sealing.resets != self.kept.counters.resets:
            return
        held, expected = tuple(digests[block].tolist()), self.expected.of_key(self._block_size, sealing.key)
        if held != expected:
            raise Violation(f"block {block} is sealed, but contains {held} in place of {expected}")

    def check_all(self) -> None:
        """Check what a process finds. Raises Violation."""
        for seals, digests in ((self.kept.device, self.device), (self.kept.host, self.host)):
            for block in range(1, len(seals) + 1):
                self.check(seals, digests, block)

    def check_complete(self, pool: Pool) -> None:
        """Check that a process finds all that the replica of its predecessor had, `pool`. Raises Violation."""
        resets = self.kept.counters.resets
        if pool.state.resets != resets:
            raise Violation(f"{pool.state.resets} resets are kept as {resets}")
        for tier, seals in ((pool.device, self.kept.device), (pool.host, self.kept.host)):
            withheld = [block for block in range(1, tier.total + 1) if tier.marks.is_withheld_or_marked(block)]
            if withheld != seals.withheld():
                raise Violation(f"the withheld blocks {withheld} are kept as {seals.withheld()}")
            for key, block in tier.keys.entries():
                if (sealing := seals.sealing(block)) is None or sealing.key != key:
                    raise Violation(f"block {block} has a key, but is not kept")

    def tick(self) -> None:
        """Pass between two stores. Raises KilledInside."""
        if self.kills and self._random.random() < self.kills:
            raise KilledInside


class _CheckedSeals(Seals):
    """Seals each of whose changes is checked."""

    def __init__(self, shared: SharedMemory, seals: Seals, digests: torch.Tensor) -> None:
        self.__dict__.update(seals.__dict__)
        self._shared, self._digests = shared, digests

    def open(self, blocks: Sequence[int]) -> None:
        super().open(blocks)
        self._shared.tick()

    def seal(self, block: int, sealing: Sealing) -> None:
        super().seal(block, sealing)
        self._shared.check(self, self._digests, block)
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
