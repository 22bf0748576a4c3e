"""One rank's slice of a model with its cache: loaded in two parts, before and after the ranks are connected."""

import logging
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from engine.attention.tensor_backend import TensorBackend
from engine.gpu.current_device import on_device
from engine.model.decoder import Decoder
from engine.model.loaded import LoadedModel
from engine.parallel import TorchRanks
from engine.parallel.loading import ModelFolder
from engine.run.runner import ModelRunner
from engine.run.samplers import sampler_for
from engine.schedule.capacity import Capacity
from engine.schedule.step_plan import StepPlan
from services.engine.ranks.placement import LOOPBACK, Placement
from services.engine.ranks.recording import recorded_or_launched
from services.engine.settings import EngineSettings
from services.engine.startup.backends import Backend, BackendOptions, choose_rank_backend, record_decoder
from services.engine.startup.cpu_quota import threads_of_rank
from services.engine.startup.decoder_check import check_logits
from services.engine.startup.device import capacity_of, check_declared_chunks, device_of, dtype_of
from services.engine.startup.gpu_pool import CudaMemory, PoolMeasurement, is_measured
from services.engine.startup.native_kernels import kernels_for
from services.engine.startup.weights import packed_format

if TYPE_CHECKING:
    from engine.gpu.graphs import CudaRecorder

# For all ranks to connect and to read their weights: one may have to wait for a slower one.
SECONDS_TO_LOAD = 1800.0

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class RankSlice:
    """A rank, connected to the others, with its slice of the model and of the cache.

    `capacity` is that of all ranks. With `ahead`, a step's launch returns before the step has ended. `recording_faults`
    is as in BackendChoice.
    """

    ranks: TorchRanks
    loaded: LoadedModel
    backend: Backend
    decoder: Decoder
    capacity: Capacity
    ahead: bool
    recording_faults: Mapping[str, str]


class SliceLoader:
    """Loads one rank's slice. What can be refused is refused before the ranks connect."""

    def __init__(self, settings: EngineSettings, place: Placement) -> None:
        """Read the configuration. Raises ModelUnsupported or InvalidSetting."""
        torch.set_num_threads(settings.threads or threads_of_rank(place.local_size))
        self.device = device_of(settings.device, place.local_rank)
        self.kernels = kernels_for(settings.attention_backend, self.device, settings.kernels_folder)
        self.settings = settings = settings.for_device(on_gpu=self.device.type == "cuda")
        """With the defaults of the device."""
        self._memory = CudaMemory(self.device) if self.device.type == "cuda" else None
        self._measurement = PoolMeasurement(self._memory) if self._memory and is_measured(settings) else None
        self._place = place
        self._dtype = dtype_of(settings.dtype, self.device, self.kernels)
        packed_format(settings, self._dtype, self.kernels)  # logs that the slices are dequantized, or refuses
        check_declared_chunks(settings, Path(settings.model))
        self._folder = ModelFolder(Path(settings.model), settings.tensor_parallel)

    @property
    def identity(self) -> dict[str, str]:
        """What must be the same on all ranks: ranks on several machines have their own files and devices."""
        dtype = str(self._dtype).removeprefix("torch.")
        return {"model": self._folder.fingerprint, "device": self.device.type, "dtype": dtype}

    def connect(self, store: Store) -> RankSlice:
        """Connect to the other ranks, allocate a cache of as many blocks as theirs, and read the weights.

        Raises ModelUnsupported, InvalidSetting, RankFailed if another rank has ended, and EngineBroken if only some can
        record their steps.
        """
        with on_device(self.device):
            return self._connect(store)

    def _connect(self, store: Store) -> RankSlice:
        settings = self.settings
        if self.device.type == "cpu" and self._place.address == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        rank, size = self._place.rank, settings.tensor_parallel
        ranks = TorchRanks(rank, size, store, self.device, SECONDS_TO_LOAD, time.monotonic)
        mine = self._folder.load(ranks, self._dtype, self.device)
        own = capacity_of(settings, mine.loaded)
        capacity = replace(
            own, device_blocks=ranks.minimum(own.device_blocks), host_blocks=ranks.minimum(own.host_blocks)
        )
        options = self._options(mine.loaded, capacity)
        backend = choose_rank_backend(options)
        decoder = mine.decoder(backend)
        check_logits(decoder, mine.loaded, backend)
        if self._measurement:
            blocks = ranks.minimum(self._blocks(self._measurement, mine.loaded, backend, decoder, capacity))
            assert isinstance(backend, TensorBackend), "those of GPUs are"
            backend.resize(blocks)
            capacity = replace(capacity, device_blocks=blocks)
        ahead = self.device.type == "cuda"
        recording_faults: dict[str, str] = {}
        if ahead:
            record = partial(record_decoder, decoder, options, backend, self._recorder())
            decoder, recording_faults = recorded_or_launched(record, decoder, ranks, store)
        ranks.limit(settings.rank_seconds)
        log.info("rank %d of %d is loaded", ranks.rank, ranks.size)
        return RankSlice(ranks, mine.loaded, backend, decoder, capacity, ahead, recording_faults)

    def _options(self, loaded: LoadedModel, capacity: Capacity) -> BackendOptions:
        settings = self.settings
        limits = settings.max_sequences, settings.token_budget
        memory = self._memory, settings.tensor_parallel
        return BackendOptions(settings.attention_backend, loaded, capacity, self.kernels, *limits, *memory)

    def _recorder(self) -> "CudaRecorder":
        from engine.gpu.graphs import CudaRecorder

        return CudaRecorder(self.device)

    def _blocks(
        self, measurement: PoolMeasurement, loaded: LoadedModel, backend: Backend, decoder: Decoder, capacity: Capacity
    ) -> int:
        """Return the blocks that fit on this rank, by a step that all ranks run; only rank 0 samples."""
        sampler = sampler_for(self.device, self.settings.max_sequences, loaded.vocabulary_size, loaded.dtype)
        runner = ModelRunner(loaded, backend, capacity.block_size, decoder=decoder, sampler=sampler)

        def run(plan: StepPlan) -> object:
            return runner.launch(plan).result() if self._place.rank == 0 else runner.forward(plan.work)

        return measurement.blocks(run, self.settings, loaded, capacity)
