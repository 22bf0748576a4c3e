"""Writes the seals of kept memory while its engine runs.

What is written, and in which order, is the protocol of docs/pool-life.md, "Kept memory": a seal is broken before its
block can be written to, and set when the last byte was. One thread calls it: the engine's.

A seal has the checksum of its block's bytes, computed when the seal is set, before anything else can write to the
block. A copy between the tiers takes the checksum of its source along; a source without a seal, such as the last block
of a sequence that is swapped out, gets one when it is copied.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from blocks import Copy
from engine.errors import KeptMemoryLost
from engine.kept.checksums import NONE, Checksums
from engine.kept.kept_memory import Counters, KeptMemory, KindMemory
from engine.kept.seals import Sealing, Seals
from engine.schedule.step_plan import Copies

_NONE: Mapping[int, Sealing] = MappingProxyType({})


class TierChanges(NamedTuple):
    """What an answer changes in the seals of one tier.

    `opened` are blocks that will be written to: granted ones, and destinations of copies. `sealed` have whole contents
    already. `held` have a holder now; `released` have none any more, in groups in the order of their release.
    """

    opened: Sequence[int] = ()
    sealed: Mapping[int, Sealing] = _NONE
    held: Sequence[int] = ()
    released: Sequence[Sequence[int]] = ()
    withheld: Sequence[int] = ()


class SealChanges(NamedTuple):
    """What an answer changes in the seals of both tiers, and in those of each window kind.

    `to_host` and `to_device` are those of its copies between the tiers that carry a key. `committed` are all device
    blocks that have got a key, those too that the same block step has moved or granted. `resets` counts the resets of
    the pool after it.
    """

    device: TierChanges = TierChanges()
    host: TierChanges = TierChanges()
    to_host: Sequence[Copy] = ()
    to_device: Sequence[Copy] = ()
    committed: Mapping[int, Sealing] = _NONE
    resets: int = 0
    windows: "Sequence[SealChanges]" = ()


class CopiedChecksums(NamedTuple):
    """Checksums of the bytes that copies have read, by destination in either tier.

    Those to the host are needed where the source has no seal; others are computed if they are missing.
    """

    to_host: Mapping[int, int] = MappingProxyType({})
    to_device: Mapping[int, int] = MappingProxyType({})


class WrongCopy(NamedTuple):
    """A copy to the device whose bytes differ from the checksum of its source, in a kind of blocks."""

    kind: int
    source: int
    destination: int


_UNKNOWN = CopiedChecksums()


class SealWriter:
    """Writes the seals of one memory, of all its kinds of blocks.

    `lost` counts the blocks of each tier that the earlier process held, and had not sealed.
    """

    def __init__(self, memory: KeptMemory, clock: Callable[[], float] | None = None) -> None:
        """Take the memory over, which ends the right of an earlier writer.

        `clock` returns seconds, which measure the checksums; without it there are none.
        """
        self._memory = memory
        self._generation = memory.counters.begin()
        self.lost = memory.take_over(self._generation)
        self._has_checksums = clock is not None
        self._kinds = [_KindWriter(kind, memory.counters, clock) for kind in memory.kinds]

    @property
    def has_checksums(self) -> bool:
        """Whether seals have checksums."""
        return self._has_checksums

    @property
    def checksum_seconds(self) -> float:
        """Time spent computing checksums, without those that are computed by copies."""
        return sum(kind.checksum_seconds for kind in self._kinds)

    @property
    def has_pending(self) -> bool:
        """Whether destinations of copies are not sealed yet."""
        return any(kind.has_pending for kind in self._kinds)

    def apply(self, changes: SealChanges) -> None:
        """Write what follows from an answer, before anything that it grants is used. Raises KeptMemoryLost."""
        if self._memory.counters.generation != self._generation:
            raise KeptMemoryLost("another process has taken over the memory of the blocks")
        for kind, own in zip(self._kinds, (changes, *changes.windows), strict=True):
            kind.apply(own)

    def on_copied(self, copies: Copies, known: Sequence[CopiedChecksums] = ()) -> list[WrongCopy]:
        """Seal the destinations of an answer's copies that have been made.

        `known` are the checksums of each kind that need not be computed. Returns the copies that differ from their
        sources' checksums, whose destinations are not sealed; none without checksums.
        """
        wrong = []
        of_kinds = known or [_UNKNOWN] * len(self._kinds)
        for number, (kind, own) in enumerate(zip(self._kinds, (copies, *copies.windows), strict=True)):
            wrong += [WrongCopy(number, *copy) for copy in kind.on_copied(own, of_kinds[number])]
        return wrong

    def source_checksums(self, kind: int, copies: Iterable[Copy]) -> dict[int, int]:
        """Return checksums of the unsealed sources of copies to the host, by destination. Call it before the copies."""
        return self._kinds[kind].source_checksums(copies)

    def on_failed(self, kind: int, copies: Iterable[Copy], *, to_host: bool) -> None:
        """Record copies to a tier that failed: their destinations stay unsealed."""
        self._kinds[kind].on_failed(copies, to_host=to_host)

    def key(self, kind: int, block: int) -> bytes:
        """Return the key of a sealed device block, empty if it is not sealed."""
        sealing = self._memory.kinds[kind].device.sealing(block)
        return sealing.key if sealing else b""

    def is_unproven(self, kind: int, block: int) -> bool:
        """Return whether a device block was adopted, and not compared with its checksum since."""
        return self._kinds[kind].is_unproven(block)

    def prove(self, kind: int, block: int) -> bool:
        """Return whether a device block's bytes are those that its seal says; True if it has no seal."""
        return self._kinds[kind].prove(block)


class _KindWriter:
    """Writes the seals of one kind of blocks.

    A destination of a copy is `pending` until the copy is made: its contents are those of its source, if that had a
    seal or is pending itself.
    """

    def __init__(self, memory: KindMemory, counters: Counters, clock: Callable[[], float] | None) -> None:
        self._memory = memory
        self._counters = counters
        self._checksums = Checksums(memory.cache, clock) if clock else None
        self._unproven = set(memory.device.cached(counters.resets)) if clock else set[int]()
        self._pending_device: dict[int, Sealing] = {}
        self._pending_host: dict[int, Sealing] = {}

    @property
    def has_pending(self) -> bool:
        return bool(self._pending_device or self._pending_host)

    def apply(self, changes: SealChanges) -> None:
        counters, device, host = self._counters, self._memory.device, self._memory.host
        committed = self._with_checksums(changes.committed)
        to_host = dict(_carried(changes.to_host, device, {**self._pending_device, **committed}))
        to_device = dict(_carried(changes.to_device, host, {**self._pending_host, **to_host}))
        counters.resets = changes.resets  # first: it breaks the seals from before a reset
        for seals, one, pending, carried in (
            (device, changes.device, self._pending_device, to_device),
            (host, changes.host, self._pending_host, to_host),
        ):
            seals.open(one.opened)
            for block in one.opened:
                pending.pop(block, None)
            pending.update(carried)
            for block in one.sealed:
                seals.seal(block, committed[block])
            seals.hold(one.held)
            for blocks in one.released:
                seals.release(blocks, counters.tick())
            seals.withhold(one.withheld)
        if self._unproven:
            self._unproven.difference_update(changes.device.opened)

    def _with_checksums(self, sealings: Mapping[int, Sealing]) -> Mapping[int, Sealing]:
        """Add the checksums of device blocks, whose bytes are complete."""
        if self._checksums is None:
            return sealings
        return {block: one._replace(checksum=self._checksums.of(block)) for block, one in sealings.items()}

    @property
    def checksum_seconds(self) -> float:
        return self._checksums.seconds if self._checksums else 0.0

    def source_checksums(self, copies: Iterable[Copy]) -> dict[int, int]:
        if self._checksums is None:
            return {}
        unsealed = [copy for copy in copies if copy.destination not in self._pending_host]
        return {copy.destination: self._checksums.of(copy.source) for copy in unsealed}

    def on_failed(self, copies: Iterable[Copy], *, to_host: bool) -> None:
        seals, pending = self._memory.device, self._pending_device
        if to_host:
            seals, pending = self._memory.host, self._pending_host
        for copy in copies:
            pending.pop(copy.destination, None)
            seals.note(copy.destination, NONE)

    def is_unproven(self, block: int) -> bool:
        return block in self._unproven

    def prove(self, block: int) -> bool:
        sealing = self._memory.device.sealing(block)
        if self._checksums is None or sealing is None:
            return True
        right = self._checksums.of(block) == sealing.checksum
        if right:
            self._unproven.discard(block)
        return right

    def on_copied(self, copies: Copies, known: CopiedChecksums) -> list[Copy]:
        # Sources that copies to the device of this answer write to are pending for those, which come later.
        refilled = {copy.destination for copy in copies.host_to_device}
        _settle(copies.device_to_host, self._pending_host, self._memory.host, self._pending_device.keys() - refilled)
        if self._checksums is not None:
            host = self._memory.host
            for copy in copies.device_to_host:
                if host.sealing(copy.destination) is None:
                    host.note(copy.destination, known.to_host.get(copy.destination, NONE))
        wrong = [copy for copy in copies.host_to_device if not self._is_right(copy, known.to_device)]
        for copy in wrong:
            self._pending_device.pop(copy.destination, None)
        _settle(copies.host_to_device, self._pending_device, self._memory.device, self._pending_host)
        return wrong

    def _is_right(self, copy: Copy, known: Mapping[int, int]) -> bool:
        """Return whether a copy to the device has the bytes that its source had when it was sealed or copied."""
        if self._checksums is None:
            return True
        expected = self._memory.host.checksum(copy.source)
        found = known.get(copy.destination) or self._checksums.of(copy.destination)
        return expected != NONE and found == expected


def _carried(copies: Iterable[Copy], source: Seals, pending: Mapping[int, Sealing]) -> Iterable[tuple[int, Sealing]]:
    """Yield the destinations of copies with the contents of their sources; sources without a seal give none."""
    for copy in copies:
        if sealing := pending.get(copy.source) or source.sealing(copy.source):
            yield copy.destination, sealing


def _settle(copies: Iterable[Copy], pending: dict[int, Sealing], target: Seals, of_sources: Collection[int]) -> None:
    for copy in copies:
        # A source that is pending still was never written to by its own copy.
        if copy.source not in of_sources and (sealing := pending.pop(copy.destination, None)):
            target.seal(copy.destination, sealing)
