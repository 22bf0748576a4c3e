"""Memory that outlives a simulated process: seals and digests of both tiers, and who may write to it.

Each store is checked, so that a kill between any two of them is: a sealed block is never written to, and a block that
is sealed has the digests of its key. Flipped slots are left out, until they are written.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

import torch

from engine.kept.header import KeptIdentity, KeptKind, kept_bytes
from engine.kept.kept_memory import KeptMemory, KindMemory
from engine.kept.seals import SEAL, Sealing, Seals, SealState
from kvmanager import Pool, PoolState
from simulation.digest_memory import FlippedSlots
from simulation.invariants.expected_contents import Digests, ExpectedContents, differ
from simulation.invariants.violation import Violation

# Of flips: of blocks that are sealed, and of a seal.
_SEALED_SHARE = 0.8
_SEAL_SHARE = 0.4


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
            kinds=tuple([KeptKind(name, "digests", size.block_size, *blocks) for name, *blocks in kinds]),
        )
        self.expected = expected
        self.owner: Owner | None = None
        self.adopted = 0  # blocks that a process has found
        self.kills = kills
        self.flips_due = 0  # before the next process finds the memory
        self.flipped_seals = 0
        self._random = random
        self.block_size = size.block_size
        self._memory = bytearray(kept_bytes(identity))
        self.kept = KeptMemory.mapped(memoryview(self._memory), identity)
        self.kinds = [SharedKind(self, kind) for kind in self.kept.kinds]

    def give_to(self, owner: Owner) -> str:
        """Let a process have the memory, in which bits are flipped if that is due; return which. Raises Violation."""
        before, self.owner = self.owner, owner
        self.check_all()
        if before is not None and before.all_written:
            self.check_complete(before.pool)
        flips, self.flips_due = [self._flip() for _ in range(self.flips_due)], 0
        self._repair()
        self.check_all()
        return ", ".join(flips)

    def _flip(self) -> str:
        """Flip a bit of a block, most often a sealed one, or of a seal."""
        random = self._random
        blocks = [
            (number, host, block)
            for number, kind in enumerate(self.kinds)
            for host in (False, True)
            for block in range(1, len(kind.seals(host=host)) + 1)
        ]
        sealed = [place for place in blocks if self.kinds[place[0]].seals(host=place[1]).sealing(place[2])]
        number, host, block = random.choice(sealed if sealed and random.random() < _SEALED_SHARE else blocks)
        kind = self.kinds[number]
        name = f"{'host ' if host else ''}block {block} of kind {number}"
        if random.random() < _SEAL_SHARE:
            self.flipped_seals += 1
            return f"{kind.flip_seal(random, block, host=host)} of {name}"
        kind.flipped.flip(random, kind.host if host else kind.device, block, host=host)
        return name

    def _repair(self) -> None:
        """Repair what was flipped, as an engine does when it maps its memory."""
        if (broken := self.kept.repair()) > self.flipped_seals:
            raise Violation(f"{broken} seals are broken, of which {self.flipped_seals} were flipped")
        if self.kept.is_damaged:
            if not (self.flipped_seals or any(kind.is_withheld for kind in self.kinds)):
                raise Violation("the memory is damaged, although no seal was flipped")
            self._memory[:] = bytes(len(self._memory))
            for kind in self.kinds:
                kind.flipped.clear()

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
        self._no_host = torch.zeros(1, shared.block_size, dtype=torch.int64)
        self.flipped = FlippedSlots()
        kept.device = _CheckedSeals(shared, kept.device, self, host=False)
        kept.host = _CheckedSeals(shared, kept.host, self, host=True)

    @property
    def device(self) -> torch.Tensor:
        """The digests of the device: `[blocks + 1, block_size]` int64."""
        return self._kept.cache

    @property
    def host(self) -> torch.Tensor:
        """The digests of the host tier."""
        return self._no_host if self._kept.host_cache is None else self._kept.host_cache

    def seals(self, *, host: bool) -> Seals:
        """The seals of a tier."""
        return self._kept.host if host else self._kept.device

    @property
    def is_withheld(self) -> bool:
        """Whether all blocks of a tier are withheld."""
        return any(seals.withheld() and len(seals.withheld()) == len(seals) for seals in self._kept.tiers)

    def stored(self, blocks: Sequence[int], *, host: bool) -> None:
        """Check blocks that were written to. Raises Violation, and KilledInside."""
        seals = self.seals(host=host)
        for block in blocks:
            if block and seals.state(block) is SealState.SEALED:
                raise Violation(f"block {block} is written to, although its seal is not broken")
        self._shared.tick()

    def flip_seal(self, random: Random, block: int, *, host: bool) -> str:
        """Flip a bit of a seal; return of which part."""
        seals = self.seals(host=host)
        row = seals._seals[block : block + 1].view("u1")  # as a fault of the machine does
        place = random.randrange(SEAL.itemsize)
        row[place] ^= 1 << random.randrange(8)
        self._revive(seals, block, host=host)
        return [name for name, (_, offset, *_) in (SEAL.fields or {}).items() if offset <= place][-1]

    def _revive(self, seals: Seals, block: int, *, host: bool) -> None:
        """Take the slots of a block as flipped that are not those of its seal, which may have been broken before."""
        if (sealing := seals.sealing(block)) is not None:
            held, expected = self._contents(sealing, block, host=host)
            wrong = [slot for slot, one in enumerate(held) if expected is None or one != expected[slot]]
            self.flipped.add(host, block, wrong)

    def _contents(self, sealing: Sealing, block: int, *, host: bool) -> tuple[Digests, Digests | None]:
        """Return the digests of a block, and those of its key."""
        held, shared = (self.host if host else self.device)[block], self._shared
        shared.expected.follow(shared.kept.counters.resets)
        return tuple(held.tolist()), shared.expected.of_key(shared.block_size, sealing.key)

    def check(self, block: int, *, host: bool) -> None:
        """Check a block that was sealed. Raises Violation."""
        sealing = self.seals(host=host).sealing(block)
        if sealing is None or sealing.resets != self._shared.kept.counters.resets:
            return
        held, expected = self._contents(sealing, block, host=host)
        if differ(held, expected, self.flipped.of(host, block)):
            raise Violation(f"block {block} is sealed, but contains {held} in place of {expected}")

    def check_all(self) -> None:
        """Check what a process finds. Raises Violation."""
        for host in (False, True):
            for block in range(1, len(self.seals(host=host)) + 1):
                self.check(block, host=host)

    def check_complete(self, state: PoolState) -> None:
        """Check that a process finds all blocks that the replica of its predecessor had. Raises Violation.

        Copies of flipped blocks are not sealed, until the manager has withheld them.
        """
        for host, tier, seals in ((False, state.device, self._kept.device), (True, state.host, self._kept.host)):
            withheld = [block for block in range(1, tier.total + 1) if tier.marks.is_withheld_or_marked(block)]
            if withheld != seals.withheld():
                raise Violation(f"the withheld blocks {withheld} are kept as {seals.withheld()}")
            for key, block in tier.keys.entries():
                is_kept = (sealing := seals.sealing(block)) is not None and sealing.key == key
                if not (is_kept or self.flipped.of(host, block)):
                    raise Violation(f"block {block} has a key, but is not kept")


class _CheckedSeals(Seals):
    """Seals each of whose changes is checked."""

    def __init__(self, shared: SharedMemory, seals: Seals, kind: SharedKind, *, host: bool) -> None:
        self.__dict__.update(seals.__dict__)
        self._shared, self._kind, self._host = shared, kind, host

    def open(self, blocks: Sequence[int]) -> None:
        super().open(blocks)
        self._shared.tick()

    def seal(self, block: int, sealing: Sealing) -> None:
        super().seal(block, sealing)
        self._kind.check(block, host=self._host)
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
