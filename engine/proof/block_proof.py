"""Makes the copies of answers, and compares blocks with their checksums before a step reads them.

Bytes that have left a step come back by adoption of kept memory, and by copies from the host tier. Each of these blocks
is compared once, when it arrives in a table; other hits are sampled. A copy that fails is found in the same way. What
differs is condemned, and computed again.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

from blocks import CondemnReason, Copy
from engine.attention.backend import Direction
from engine.errors import EngineBroken
from engine.kept.seal_writer import CopiedChecksums, SealWriter
from engine.schedule.pool.condemnations import AdmittedBlocks, WrongBlock
from engine.schedule.step_plan import Copies

# Of a kind of blocks, whether two of them have the same contents.
IsSame = Callable[[int, int, int], bool]

_Launch = Callable[[Sequence[Copy]], Sequence[int] | None]
_Owners = Mapping[tuple[int, int], tuple[int, CondemnReason]]

# A copy for a request that has ended meanwhile.
_NOBODY = (0, CondemnReason.HOST_HIT)


class CopyingBackend(Protocol):
    """Copies the blocks of one kind; on a CPU a copy is done when the call returns.

    A backend that `checks_copies` has `swap_checked` too, which also returns the checksum of the bytes of each copy.
    """

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks within the device."""

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy blocks to the other tier."""


class ProofCounts(NamedTuple):
    """How many blocks were compared with their checksums, and found wrong, by reason."""

    compared: dict[CondemnReason, int]
    wrong: dict[CondemnReason, int]
    seconds: float


class BlockProof:
    """Compares the blocks of one engine. Its thread calls it, except for `counts`."""

    def __init__(
        self,
        backends: Sequence[CopyingBackend],
        seals: SealWriter,
        share: float = 0.0,
        random: Callable[[], float] = lambda: 0.0,
        recomputed_share: float = 0.0,
        is_same: IsSame | None = None,
    ) -> None:
        """Take the backend of each kind. `share` of the blocks that never left are compared at hits.

        `recomputed_share` of the hits are computed again, and compared by `is_same`. `random` returns numbers from 0 to
        1, which choose both.
        """
        assert is_same or not recomputed_share
        self._is_same = is_same
        self.seals = seals
        self.backends = backends
        self._share = share
        self._recomputed_share = recomputed_share
        self._remembered: list[list[bytes]] = []
        self.copy_failure: Exception | None = None  # of the last copy that failed
        self._random = random
        self._compared = Counter[CondemnReason]()
        self._wrong = Counter[CondemnReason]()

    @property
    def counts(self) -> ProofCounts:
        """What was compared since the start."""
        return ProofCounts(dict(self._compared), dict(self._wrong), self.seals.checksum_seconds)

    def check(self, answers: Sequence[Copies], arrivals: Sequence[AdmittedBlocks]) -> list[WrongBlock]:
        """Make the copies of answers, then compare what arrived with them. Return the wrong blocks, each once."""
        owners = _owners(arrivals) if answers else {}
        found: list[WrongBlock] = []
        copied: set[tuple[int, int]] = set()
        for copies in answers:
            made = [self._make(kind, own, found) for kind, own in enumerate((copies, *copies.windows))]
            self._compare_copies(made, owners, found)
            copied.update(
                (kind, copy.destination) for kind, own in enumerate(made) for copy in own.copies.host_to_device
            )
        for arrival in arrivals:
            found += self._compare(arrival, copied)
        unique: dict[tuple[int, bool, int], WrongBlock] = {}
        for one in found:
            unique.setdefault((one.kind, one.host, one.block), one)
        self._wrong.update(one.reason for one in unique.values())
        return list(unique.values())

    def chooses_recomputation(self) -> bool:
        """Return whether a hit is to be computed again."""
        return self._recomputed_share > 0 and self._random() < self._recomputed_share

    def remember(self, hit: AdmittedBlocks) -> None:
        """Remember which keys the blocks of a hit have."""
        self._remembered = [[self.seals.key(kind, block) for block in table] for kind, table in enumerate(hit.tables)]

    def differences(self, hit: AdmittedBlocks, tables: Sequence[tuple[int, ...]]) -> list[WrongBlock]:
        """Return the blocks of the remembered hit that still have its keys, and differ from recomputed ones."""
        reason = CondemnReason.RECOMPUTATION
        found = []
        for kind, (table, keys) in enumerate(zip(hit.tables, self._remembered, strict=True)):
            for block, key, own in zip(table, keys, tables[kind], strict=True):
                if not (block and own and key) or self.seals.key(kind, block) != key:
                    continue
                self._compared[reason] += 1
                if self._is_same is None or not self._is_same(kind, block, own):
                    found.append(WrongBlock(kind, False, block, reason, hit.sequence))
        self._wrong[reason] += len(found)
        return found

    def _make(self, kind: int, copies: Copies, found: list[WrongBlock]) -> "_Made":
        """Make the copies of one kind. Return those that succeeded, and add the destinations of the others."""
        computed = {} if self._checks(kind) else self.seals.source_checksums(kind, copies.device_to_host)
        to_host = _Copying.of(copies.device_to_host, self._launch(kind, Direction.DEVICE_TO_HOST))
        to_device = _Copying.of(copies.host_to_device, self._launch(kind, Direction.HOST_TO_DEVICE))
        within = _Copying.of(copies.device_to_device, self.backends[kind].copy_blocks)
        self.copy_failure = to_host.failure or to_device.failure or within.failure or self.copy_failure
        self.seals.on_failed(kind, to_host.failed, to_host=True)
        self.seals.on_failed(kind, to_device.failed, to_host=False)
        reason = CondemnReason.COPY
        found += [WrongBlock(kind, True, copy.destination, reason) for copy in to_host.failed]
        found += [WrongBlock(kind, False, copy.destination, reason) for copy in (*to_device.failed, *within.failed)]
        done = Copies(tuple(to_host.made), tuple(to_device.made), tuple(within.made))
        return _Made(done, CopiedChecksums(computed | to_host.checksums, to_device.checksums))

    def _launch(self, kind: int, direction: Direction) -> _Launch:
        """Return what copies blocks of a kind in a direction, with their checksums if its backend computes them."""
        backend: Any = self.backends[kind]
        return partial(backend.swap_checked if self._checks(kind) else backend.swap, direction=direction)

    def _checks(self, kind: int) -> bool:
        return self.seals.has_checksums and getattr(self.backends[kind], "checks_copies", False)

    def _compare_copies(self, made: Sequence["_Made"], owners: _Owners, found: list[WrongBlock]) -> None:
        """Compare the destinations of copies to the device, of one answer, with what their sources had."""
        for kind, own in enumerate(made if self.seals.has_checksums else ()):
            for copy in own.copies.host_to_device:
                self._compared[owners.get((kind, copy.destination), _NOBODY)[1]] += 1
        done, *windows = [one.copies for one in made]
        wrong = self.seals.on_copied(done._replace(windows=tuple(windows)), [one.checksums for one in made])
        for kind, source, destination in wrong:
            sequence, reason = owners.get((kind, destination), _NOBODY)
            found.append(WrongBlock(kind, False, destination, reason, sequence))
            found.append(WrongBlock(kind, True, source, reason, sequence))

    def _compare(self, arrival: AdmittedBlocks, copied: Collection[tuple[int, int]]) -> Iterable[WrongBlock]:
        for kind, table in enumerate(arrival.tables):
            for block in table:
                if not block or (kind, block) in copied:
                    continue
                unproven = self.seals.is_unproven(kind, block)
                if unproven or (self._share and self._random() < self._share):
                    reason = CondemnReason.ADOPTION if unproven else CondemnReason.HIT
                    self._compared[reason] += 1
                    if not self.seals.prove(kind, block):
                        yield WrongBlock(kind, False, block, reason, arrival.sequence)


def _owners(arrivals: Sequence[AdmittedBlocks]) -> _Owners:
    """Return by kind and block in whose table a block arrived, and how."""
    return {
        (kind, block): (arrival.sequence, CondemnReason.SWAP_IN if arrival.swapped_in else CondemnReason.HOST_HIT)
        for arrival in arrivals
        for kind, table in enumerate(arrival.tables)
        for block in table
    }


class _Made(NamedTuple):
    """The copies of one kind that were made, and the checksums that they computed."""

    copies: Copies
    checksums: CopiedChecksums


@dataclass
class _Copying:
    """Copies of one list: those made, with their checksums if the backend computes them, and those that failed."""

    made: list[Copy] = field(default_factory=list)
    failed: list[Copy] = field(default_factory=list)
    checksums: dict[int, int] = field(default_factory=dict)
    failure: Exception | None = None

    @classmethod
    def of(cls, copies: Sequence[Copy], launch: _Launch) -> Self:
        """Make copies; if that fails, one by one."""
        copying = cls()
        if copies and not copying._make(copies, launch):
            for copy in copies:
                if not copying._make([copy], launch):
                    copying.failed.append(copy)
        return copying

    def _make(self, copies: Sequence[Copy], launch: _Launch) -> bool:
        """Make copies; return whether they succeeded. Raises EngineBroken."""
        try:
            checksums = launch(copies)
        except EngineBroken:
            raise
        except Exception as failure:
            self.failure = failure
            return False
        self.made += copies
        self.checksums.update(zip([copy.destination for copy in copies], checksums or (), strict=False))
        return True
