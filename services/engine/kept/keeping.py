"""Keeps the blocks of an engine in memory that outlives its process, and adopts what an earlier process left."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Protocol

import torch

from engine.attention.cache import CacheLayout
from engine.kept.checksums import NAME
from engine.kept.header import KeptIdentity, KeptKind
from engine.kept.kept_memory import KeptMemory
from engine.kept.seal_writer import SealWriter
from engine.model.loaded import LoadedModel, dtype_name
from engine.schedule.capacity import Capacity
from engine.schedule.step_plan import Launched, Runner, StepPlan
from kvmanager import PoolReport
from services.engine.events.settings import PUBLISHED, EventSettings
from services.engine.kept.boot_id import boot_id
from services.engine.kept.digests import ModelFiles, code_digest
from services.engine.kept.kept_report import kept_report
from services.engine.kept.memory_file import MemoryFile
from services.engine.kept.origin_rows import OriginRows, row_bytes
from services.engine.observer import KeptStats

# For a process that was killed, and whose threads the kernel still ends.
_LOCK_SECONDS = 10.0
# Of this process, while it loads its model: a stop then erases them.
_opened: list[MemoryFile] = []

DAMAGE = "damage"
"""In place of a difference: the memory contradicts itself."""

log = logging.getLogger("quire.engine")


class KeepingBackend(Protocol):
    """The backend of one kind of blocks, whose cache can lie elsewhere."""

    cache: torch.Tensor
    layout: CacheLayout

    def use(self, cache: torch.Tensor, host_cache: torch.Tensor | None) -> None:
        """Use other tensors of the same shapes from now on."""


@dataclass(frozen=True)
class Keeping:
    """The kept memory of an engine. `refused` is why blocks of an earlier process are not used, empty if they are.

    `broken` counts the seals that differ from their checksums. `rows` have what the keys are hashes of, None without KV
    events.
    """

    file: MemoryFile
    memory: KeptMemory
    report: PoolReport
    seals: SealWriter
    refused: str = ""
    broken: int = 0
    rows: OriginRows | None = None

    def stats(self) -> KeptStats:
        """Return the numbers of its blocks."""
        resets, kinds = self.memory.counters.resets, self.memory.kinds
        sealed = (
            sum(kind.device.sealed_count(resets) for kind in kinds),
            sum(kind.host.sealed_count(resets) for kind in kinds),
        )
        adopted = _keyed(self.report)
        lost, unknown = _by_tier(self.seals.lost), self.rows.unknown if self.rows else None
        return KeptStats(_by_tier(sealed), _by_tier(adopted), lost, self.refused, self.broken, unknown)

    def end(self, *, keep: bool) -> None:
        """Give the memory up at a planned end, and erase it unless it is to be kept."""
        if self.rows:
            self.rows.close()
        if not keep:
            self.file.erase()
        self.file.close()


def kept_file(path: Path) -> MemoryFile:
    """Open the memory at a path, which no other process uses until this one has ended.

    Raises InvalidSetting if the file cannot be used, and MemoryInUse if another process uses it.
    """
    file = MemoryFile(path, _LOCK_SECONDS)
    _opened.append(file)
    return file


def erase_opened() -> None:
    """Erase what this process has opened, when it is stopped before its engine has it."""
    for file in _opened:
        file.erase()


def keep(
    file: MemoryFile,
    identity: KeptIdentity,
    backends: Sequence[KeepingBackend],
    clock: Callable[[], float] | None = None,
    events: EventSettings | None = None,
) -> Keeping:
    """Map a memory, and let the backend of each kind use it. Raises InvalidSetting if there is no room for it.

    `clock` measures the checksums of the identity, in seconds. With KV events there are rows behind the blocks; without
    them, those of an earlier process are erased.
    """
    different, broken = file.difference(identity), 0
    if different == "":
        found = KeptMemory.mapped(file.map(identity), identity)
        broken = found.repair()
        if found.is_damaged:
            log.warning("the kept blocks are damaged: they are erased")
            different = DAMAGE
    elif different:
        log.warning("the kept blocks differ in %s: they are erased", different)
    if different != "":
        file.make(identity)
    beside = _mapped_rows(file, identity, events)
    memory = KeptMemory.mapped(file.map(identity), identity)
    seals = SealWriter(memory, clock if identity.checksums else None)
    _opened.clear()
    report = kept_report(memory)
    rows = OriginRows(beside, identity, report, salts=_has_salts(events)) if beside else None
    for backend, kind in zip(backends, memory.kinds, strict=True):
        backend.use(kind.cache, kind.host_cache)
    if different == "":
        log.info("%d device blocks and %d host blocks have outlived their engine", *_keyed(report))
        if any(withheld := _withheld(report)):
            log.warning("%d device blocks and %d host blocks stay withheld", *withheld)
        if broken:
            log.error("broken seals: %d; their blocks will be computed again", broken)
        if rows and rows.unknown:
            log.info("%d kept blocks are not announced in KV events, because their tokens are unknown", rows.unknown)
    return Keeping(file, memory, report, seals, different or "", 0 if different else broken, rows)


def _mapped_rows(file: MemoryFile, identity: KeptIdentity, events: EventSettings | None) -> memoryview | None:
    if events and events.has_events:
        return file.map_behind(identity, row_bytes(identity))
    file.erase_behind(identity)
    return None


def _has_salts(events: EventSettings | None) -> bool:
    return events is not None and events.kv_events_salts == PUBLISHED


def _keyed(report: PoolReport) -> tuple[int, int]:
    """Return the numbers of cached blocks of both tiers, in all kinds."""
    kinds = (report, *report.windows)
    return sum(len(kind.device.keyed) for kind in kinds), sum(len(kind.host.keyed) for kind in kinds)


def _withheld(report: PoolReport) -> tuple[int, int]:
    """Return the numbers of withheld blocks of both tiers, in all kinds."""
    kinds = (report, *report.windows)
    return sum(len(kind.device.withheld) for kind in kinds), sum(len(kind.host.withheld) for kind in kinds)


def _by_tier(counts: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("device", "host"), counts, strict=True))


class SealingRunner:
    """A runner that seals the destinations of copies when they are made, which on a CPU is within the launch."""

    def __init__(self, runner: Runner, seals: SealWriter) -> None:
        self._runner = runner
        self._seals = seals

    def launch(self, plan: StepPlan) -> Launched:
        """See Runner."""
        launched = self._runner.launch(plan)
        for copies in plan.copies:
            self._seals.on_copied(copies)
        return launched


def identity_of(
    loaded: LoadedModel,
    weights: ModelFiles,
    capacity: Capacity,
    backends: Sequence[KeepingBackend],
    computed_by: str,
    checksum: str = NAME,
) -> KeptIdentity:
    """Describe the blocks of an engine, whose kinds have these backends.

    `computed_by` names its backend, kernels, decoder and threads, `checksum` what computes checksums.

    Raises ModelUnsupported if the model's files have changed since `weights` were digested, before they were loaded.
    """
    weights.check_unchanged()
    computed = "\n".join((weights.digest, loaded.fingerprint, code_digest(), computed_by))
    return KeptIdentity(
        fingerprint=hashlib.sha256(computed.encode()).hexdigest(),
        boot_id=boot_id(),
        backend=computed_by,
        dtype=dtype_name(loaded.cache_dtype),
        block_size=capacity.block_size,
        checksums=checksum,
        kinds=tuple(starmap(_kept_kind, zip(_sizes_of(capacity), backends, strict=True))),
    )


def _sizes_of(capacity: Capacity) -> list[tuple[str, int, int]]:
    windows = [(kind.name, kind.device_blocks, kind.host_blocks) for kind in capacity.windows]
    return [("all", capacity.device_blocks, capacity.host_blocks), *windows]


def _kept_kind(sizes: tuple[str, int, int], backend: KeepingBackend) -> KeptKind:
    name, *blocks = sizes
    return KeptKind(name, backend.layout.description(), backend.layout.elements, *blocks)
