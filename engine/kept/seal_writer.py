"""Writes the seals of kept memory while its engine runs.

What is written, and in which order, is the protocol of docs/architecture.md, "Kept memory": a seal is broken before its
block can be written to, and set when the last byte was. One thread calls it: the engine's.
"""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from blocks import Copy
from engine.errors import KeptMemoryLost
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
    blocks that have got a key, those too that the same Step has moved or granted. `resets` counts the resets of the
    pool after it.
    """

    device: TierChanges = TierChanges()
    host: TierChanges = TierChanges()
    to_host: Sequence[Copy] = ()
    to_device: Sequence[Copy] = ()
    committed: Mapping[int, Sealing] = _NONE
    resets: int = 0
    windows: "Sequence[SealChanges]" = ()


class SealWriter:
    """Writes the seals of one kept memory, of all its kinds of blocks.

    `lost` counts the blocks of each tier that the earlier process held, and had not sealed.
    """

    def __init__(self, memory: KeptMemory) -> None:
        """Take the memory over, which ends the right of an earlier writer."""
        self._memory = memory
        self._generation = memory.counters.begin()
        self.lost = memory.take_over(self._generation)
        self._kinds = [_KindWriter(kind, memory.counters) for kind in memory.kinds]

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

    def on_copied(self, answers: Iterable[Copies]) -> None:
        """Seal the destinations of copies that have been made, in the order in which they were."""
        for copies in answers:
            for kind, own in zip(self._kinds, (copies, *copies.windows), strict=True):
                kind.on_copied(own)


class _KindWriter:
    """Writes the seals of one kind of blocks.

    A destination of a copy is `pending` until the copy is made: its contents are those of its source, if that had a
    seal or is pending itself.
    """

    def __init__(self, memory: KindMemory, counters: Counters) -> None:
        self._memory = memory
        self._counters = counters
        self._pending_device: dict[int, Sealing] = {}
        self._pending_host: dict[int, Sealing] = {}

    @property
    def has_pending(self) -> bool:
        return bool(self._pending_device or self._pending_host)

    def apply(self, changes: SealChanges) -> None:
        counters, device, host = self._counters, self._memory.device, self._memory.host
        to_host = dict(_carried(changes.to_host, device, {**self._pending_device, **changes.committed}))
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
            for block, sealing in one.sealed.items():
                seals.seal(block, sealing)
            seals.hold(one.held)
            for blocks in one.released:
                seals.release(blocks, counters.tick())
            seals.withhold(one.withheld)

    def on_copied(self, copies: Copies) -> None:
        _settle(copies.device_to_host, self._pending_host, self._memory.host, self._pending_device)
        _settle(copies.host_to_device, self._pending_device, self._memory.device, self._pending_host)


def _carried(copies: Iterable[Copy], source: Seals, pending: Mapping[int, Sealing]) -> Iterable[tuple[int, Sealing]]:
    """Yield the destinations of copies with the contents of their sources; sources without a seal give none."""
    for copy in copies:
        if sealing := pending.get(copy.source) or source.sealing(copy.source):
            yield copy.destination, sealing


def _settle(
    copies: Iterable[Copy], pending: dict[int, Sealing], target: Seals, of_sources: Mapping[int, Sealing]
) -> None:
    for copy in copies:
        # A source that is pending still was never written to by its own copy.
        if copy.source not in of_sources and (sealing := pending.pop(copy.destination, None)):
            target.seal(copy.destination, sealing)
