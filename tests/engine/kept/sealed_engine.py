"""An engine whose blocks have seals and checksums, in one process with its block manager; its memory can outlive it."""

import random
import time
from pathlib import Path
from typing import Any

import torch

from blocks import Reattached, StepResult
from engine.attention.cache import CacheGeometry
from engine.kept.kept_memory import KeptMemory
from engine.kept.seal_writer import SealWriter
from engine.kept.seals import SealState
from engine.kinds.kinds_backend import CachingBackend, backends_of
from engine.native.cpu_backend import CpuBackend
from engine.proof.block_proof import BlockProof
from engine.proof.closeness import close_blocks
from engine.schedule.capacity import Capacity
from kvmanager import PoolReport
from services.engine.kept.kept_report import kept_report
from services.engine.replica import Replica
from tests.engine import native_kernels
from tests.engine_in_process import EightBitEngine, FickleBlocks, ModelEngine, Observer
from tests.in_process import adopted


class SealedBlocks(FickleBlocks):
    """A block manager whose answers are written to seals before the engine has them, as those of a stream are."""

    def __init__(self, capacity: Capacity, observe: Observer | None, seals: SealWriter, report: PoolReport) -> None:
        self._seals = seals
        self._report = report
        super().__init__(capacity, observe)
        if self._report.device.keyed or self._report.device.withheld:
            spec = self.session.pool.spec
            self.session = self.manager.attach(spec, adopted(spec, self._report))
            self.ready, self._returned = False, True

    def make_replica(self) -> Replica:
        return Replica(self.session.pool.spec, self._report, seals=True)

    def receive(self) -> StepResult | None:
        try:
            return super().receive()
        except Reattached:
            raise
        finally:
            for changes in self._replica.take_changes():
                self._seals.apply(changes)


class SealedEngine(ModelEngine):
    """An engine of a model on the CPU whose blocks have seals."""

    def __init__(
        self,
        folder: Path,
        memory: KeptMemory | None = None,
        share: float = 0.0,
        recomputed_share: float = 0.0,
        **sizes: Any,
    ) -> None:
        """Adopt what another engine of the same sizes left in `memory`.

        `share` of the other blocks that are hit are compared, and `recomputed_share` of the hits computed again.
        """
        self._recomputed_share = recomputed_share
        self.memory = memory
        self._share = share
        self.report = PoolReport()
        if memory is not None:
            self.broken = memory.repair()
            self.report = kept_report(memory)
        super().__init__(folder, **sizes)

    def make_blocks(self, capacity: Capacity, observe: Observer | None) -> FickleBlocks:
        backends = backends_of(self.backend)
        if self.memory is None:
            self.memory = KeptMemory.private([(one.cache, one.host_cache) for one in backends])
        for backend, kind in zip(backends, self.memory.kinds, strict=True):
            backend.use(kind.cache, kind.host_cache)
        self.seals = SealWriter(self.memory, time.perf_counter)
        return SealedBlocks(capacity, observe, self.seals, self.report)

    def make_proof(self) -> BlockProof:
        backends, drawn = backends_of(self.backend), random.Random(0).random
        shares = self._share, drawn, self._recomputed_share
        self.proof = BlockProof(backends, self.seals, *shares, close_blocks(backends))
        return self.proof

    def bytes_of(self, kind: int, *, host: bool = False) -> torch.Tensor:
        """Return the bytes of the blocks of a tier, `[blocks + 1, bytes]`."""
        assert self.memory is not None
        one = self.memory.kinds[kind]
        tensor = one.host_cache if host else one.cache
        assert tensor is not None
        return tensor.view(torch.uint8)

    def sealed(self, kind: int = 0, *, host: bool = False) -> list[int]:
        """Return the sealed blocks of a tier."""
        assert self.memory is not None
        seals = self.memory.kinds[kind].tiers[host]
        return [block for block in range(1, len(seals) + 1) if seals.state(block) is SealState.SEALED]

    def host_blocks_in_use(self, kind: int = 0) -> list[int]:
        """Return the host blocks that swapped sequences hold."""
        host = self.blocks.pool.state.kinds[kind].host
        return [block for block in range(1, host.total + 1) if host.ref_count(block)]

    def flip(self, source: random.Random, block: int, kind: int = 0, *, host: bool = False) -> None:
        """Flip one bit of a block."""
        row = self.bytes_of(kind, host=host)[block]
        row[source.randrange(len(row))] ^= 1 << source.randrange(8)

    def successor(self, **sizes: Any) -> "SealedEngine":
        """Return the engine that adopts the memory when this one has died."""
        return type(self)(self.folder, self.memory, **sizes)


class WindowedEngine(SealedEngine):
    """The same with blocks of several kinds."""

    def __init__(self, folder: Path, memory: KeptMemory | None = None, **sizes: Any) -> None:
        super().__init__(folder, memory, kinds=True, **sizes)


class NativeEngine(SealedEngine):
    """The same with the CPU's kernels, whose copies compute checksums."""

    def make_backend(
        self, geometry: CacheGeometry, block_size: int, device_blocks: int, host_blocks: int
    ) -> CachingBackend:
        return CpuBackend(native_kernels.kernels(), geometry, block_size, device_blocks, host_blocks=host_blocks)


class SealedEightBitEngine(SealedEngine, EightBitEngine):
    """The same with K and V in 8 bits."""
