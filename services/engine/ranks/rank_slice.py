"""One rank's slice of a model with its cache: loaded in two parts, before and after the ranks are connected."""

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from engine.model.decoder import Decoder
from engine.model.loaded import LoadedModel
from engine.parallel import Shard, TorchRanks
from engine.parallel.llama import ParallelLlama
from engine.parallel.loading import load_slice
from engine.schedule.request import Capacity
from services.engine.settings import EngineSettings
from services.engine.startup.backends import Backend, BackendOptions, choose_rank_backend, recorded_decoder
from services.engine.startup.device import capacity_of, device_of, dtype_of
from services.engine.startup.native_kernels import kernels_for

LOOPBACK = "127.0.0.1"
# For all ranks to connect, after each has imported its packages and read the configuration.
START_SECONDS = 120.0
_MIB = 1 << 20

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class RankSlice:
    """A rank, connected to the others, with its slice of the model and of the cache.

    `capacity` is that of all ranks. With `ahead`, a step's launch returns before the step has ended.
    """

    ranks: TorchRanks
    loaded: LoadedModel
    backend: Backend
    decoder: Decoder
    capacity: Capacity
    ahead: bool


class SliceLoader:
    """Loads one rank's slice. What can be refused is refused before the ranks connect."""

    def __init__(self, settings: EngineSettings, rank: int) -> None:
        """Read the configuration. Raises ModelUnsupported or InvalidSetting."""
        size = settings.tensor_parallel
        torch.set_num_threads(settings.threads or max(1, len(os.sched_getaffinity(0)) // size))
        self.device = device_of(settings.device, rank)
        self.kernels = kernels_for(settings.attention_backend, self.device, settings.kernels_folder)
        self._settings = settings
        self._shard = Shard(rank, size)
        dtype = dtype_of(settings.dtype, self.device, self.kernels)
        self._model = load_slice(Path(settings.model), self._shard, dtype, self.device)
        self._own = capacity_of(settings, self._model.loaded)

    def connect(self, store: Store) -> RankSlice:
        """Connect to the other ranks, allocate a cache of as many blocks as theirs, and read the weights.

        Raises ModelUnsupported, InvalidSetting, and torch.distributed.DistError.
        """
        if self.device.type == "cpu":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        ranks = TorchRanks(self._shard.rank, self._shard.size, store, self.device, self._settings.rank_seconds)
        capacity = replace(
            self._own,
            device_blocks=ranks.minimum(self._own.device_blocks),
            host_blocks=ranks.minimum(self._own.host_blocks),
        )
        attention, loaded, sequences = (
            self._settings.attention_backend,
            self._model.loaded,
            self._settings.max_sequences,
        )
        options = BackendOptions(attention, loaded, capacity, self.kernels, sequences)
        backend = choose_rank_backend(options)
        decoder: Decoder = ParallelLlama(self._model.shape, self._model.weights, backend, ranks, loaded.context_tokens)
        read = self._model.weights.read_bytes / _MIB
        log.info("rank %d of %d has read %.1f MiB of the weights", ranks.rank, ranks.size, read)
        ahead = self.device.type == "cuda"
        if ahead:
            decoder = recorded_decoder(decoder, options) or decoder
        return RankSlice(ranks, loaded, backend, decoder, capacity, ahead)
