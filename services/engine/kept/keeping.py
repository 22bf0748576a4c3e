"""Keeps an engine's blocks beyond its process: finds what an earlier process left, or begins anew."""

import hashlib
import logging
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

import torch

from engine.kept.kept_memory import KeptIdentity, KeptMemory
from engine.kept.seal_writer import SealWriter
from engine.model.loaded import LoadedModel, dtype_name
from engine.schedule.request import Capacity
from engine.schedule.step_plan import Launched, Runner, StepPlan
from kvmanager import PoolReport
from services.engine.kept.boot import boot_id
from services.engine.kept.digests import FileDigests, code_digest, model_digest
from services.engine.kept.kept_report import kept_report
from services.engine.kept.memory_file import MemoryFile
from services.engine.observer import KeptStats
from services.engine.settings import EngineSettings
from services.runtime.child_process import KEPT_MEMORY
from services.runtime.settings import InvalidSetting

AUTO, MEMORY, OFF = "auto", "memory", "off"
# For a process that was killed, and whose threads the kernel still ends.
_LOCK_SECONDS = 10.0

log = logging.getLogger("quire.engine")


def kept_path(settings: EngineSettings, device: torch.device) -> Path | None:
    """Return where the blocks are kept, None if they are not. Raises InvalidSetting."""
    given, held = settings.keep_blocks, os.environ.get(KEPT_MEMORY)
    if given == OFF or (given == AUTO and (held is None or device.type != "cpu")):
        return None
    if device.type != "cpu":
        raise InvalidSetting(f"keep_blocks is {given!r}, but the memory of a GPU ends with its process: it must be off")
    if given not in (AUTO, MEMORY):
        path = Path(given)
        return path / f"{_file_name(settings)}.blocks" if path.is_dir() else path
    if held is None:
        fault = "which only quire serve has: give a file or folder in tmpfs or hugetlbfs"
        raise InvalidSetting(f"keep_blocks is 'memory', {fault}")
    return Path(held)


def _file_name(settings: EngineSettings) -> str:
    """Return the name of an engine's file in a folder of several."""
    return quote(settings.engine_id or socket.gethostname(), safe="")


class KeepingBackend(Protocol):
    """A backend whose cache can lie elsewhere."""

    cache: torch.Tensor

    def block_shape(self) -> tuple[int, ...]:
        """Return the shape of a block of one layer's K or V."""

    def use(self, cache: torch.Tensor, host_cache: torch.Tensor | None) -> None:
        """Use other tensors of the same shapes from now on."""


@dataclass(frozen=True)
class Keeping:
    """The kept memory of an engine. `refused` is why blocks of an earlier process are not used, empty if they are."""

    file: MemoryFile
    memory: KeptMemory
    report: PoolReport
    seals: SealWriter
    refused: str = ""

    def stats(self) -> KeptStats:
        """Return the numbers of its blocks."""
        sealed = self.memory.device.sealed_count(), self.memory.host.sealed_count()
        adopted = len(self.report.device.keyed), len(self.report.host.keyed)
        return KeptStats(_by_tier(sealed), _by_tier(adopted), _by_tier(self.seals.lost), self.refused)

    def end(self, *, keep: bool) -> None:
        """Give the memory up at a planned end, and erase it unless it is to be kept."""
        if not keep:
            self.file.erase()
        self.file.close()


def keep(path: Path, identity: KeptIdentity, backend: KeepingBackend) -> Keeping:
    """Map the memory at a path, and let the backend use it.

    Raises InvalidSetting if the file cannot be used, and MemoryInUse if another process uses it.
    """
    file = MemoryFile(path, _LOCK_SECONDS)
    different = file.difference(identity)
    if different:
        log.warning("the kept blocks are of another %s: they are erased", different)
    if different != "":
        file.make(identity)
    memory = file.map(identity)
    seals = SealWriter(memory)
    report = kept_report(memory)
    backend.use(memory.cache, memory.host_cache)
    if different == "":
        counts = len(report.device.keyed), len(report.host.keyed)
        log.info("%d device blocks and %d host blocks have outlived their engine", *counts)
    return Keeping(file, memory, report, seals, different or "")


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
        if plan.copies:
            self._seals.on_copied(plan.copies)
        return launched


def identity_of(loaded: LoadedModel, capacity: Capacity, backend: KeepingBackend, computed_by: str) -> KeptIdentity:
    """Describe the blocks of an engine. `computed_by` names its backend, kernels, decoder and threads."""
    assert loaded.folder is not None, "models of engines have a folder"
    from services.models.model_store import default_cache

    digests = FileDigests(default_cache().parent / "digests")
    computed = "\n".join((model_digest(loaded.folder, digests), loaded.fingerprint, code_digest(), computed_by))
    return KeptIdentity(
        fingerprint=hashlib.sha256(computed.encode()).hexdigest(),
        boot_id=boot_id(),
        backend=computed_by,
        dtype=dtype_name(loaded.cache_dtype),
        layers=loaded.geometry.layers,
        block_shape=backend.block_shape(),
        block_size=capacity.block_size,
        device_blocks=capacity.device_blocks,
        host_blocks=capacity.host_blocks,
    )
