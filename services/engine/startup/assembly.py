"""Assembles an engine from its settings: model, cache, backend, scheduler. Takes seconds; run it on a thread."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from blocks import Copy
from engine.attention.backend import Direction
from engine.attention.cache import CacheGeometry
from engine.gpu.device_watch import WatchedRunner, check_of
from engine.model.loaded import LoadedModel
from engine.model.sizing import blocks_within
from engine.native.decoder import NativeDecoder
from engine.native.kernels import Kernels
from engine.run.runner import ModelRunner
from engine.schedule.pool.preemption import PreemptionCosts
from engine.schedule.request import Capacity
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Runner
from kvmanager import limits
from kvmanager.pool_spec import MAX_TIER_BLOCKS
from services.engine.settings import EngineSettings
from services.engine.startup.backends import Backend, BackendOptions, choose_backend
from services.engine.startup.native_kernels import kernels_for
from services.engine.startup.verified_models import VerifiedModel, VerifiedModels
from services.runtime.settings import InvalidSetting

_MIB = 1024 * 1024
_MEASURED_COPIES = 8
# A Step's prompts are at most the token budget and one more prompt.
MAX_CONTEXT_TOKENS = limits.MAX_PROMPT_TOKENS // 2

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class EngineParts:
    """A loaded model with its cache, ready to be connected to a block manager."""

    loaded: LoadedModel
    scheduler: Scheduler
    runner: Runner
    device: str


def assemble(settings: EngineSettings) -> EngineParts:
    """Load the model from its folder and allocate its cache. Raises ModelUnsupported or InvalidSetting."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    device = _device(settings.device)
    folder = Path(settings.model)
    log.info("loading %s", folder.name)
    kernels = kernels_for(settings.attention_backend, device, settings.kernels_folder)
    loaded = _load(settings, device, kernels)
    capacity = Capacity(
        context_tokens=min(loaded.context_tokens, MAX_CONTEXT_TOKENS, limits.MAX_TABLE_BLOCKS * settings.block_size),
        vocabulary_size=loaded.vocabulary_size,
        block_size=settings.block_size,
        device_blocks=_device_blocks(settings, loaded.geometry, loaded.dtype),
        host_blocks=settings.host_blocks,
    )
    chosen = choose_backend(
        BackendOptions(settings.attention_backend, loaded, capacity, kernels, settings.max_sequences)
    )
    if kernels and loaded.model and isinstance(chosen.decoder, NativeDecoder) and chosen.decoder.from_files:
        VerifiedModels(Path(settings.kernels_folder)).add(folder, kernels, VerifiedModel.of(loaded))
    costs = PreemptionCosts(_seconds_per_swapped_block(chosen.backend))
    scheduler = Scheduler(capacity, settings.limits(), costs, ahead=chosen.ahead)
    runner = ModelRunner(loaded, chosen.backend, capacity.block_size, decoder=chosen.decoder, clock=time.monotonic)
    return EngineParts(loaded, scheduler, WatchedRunner(runner, check_of(device)), _device_name(device, kernels))


def _load(settings: EngineSettings, device: torch.device, kernels: Kernels | None) -> LoadedModel:
    """Load the model, without transformers if its decoder was verified at an earlier start."""
    folder, dtype = Path(settings.model), _dtype(settings.dtype, device, kernels)
    if kernels and dtype == torch.bfloat16 and settings.kernels_folder:
        verified = VerifiedModels(Path(settings.kernels_folder)).find(folder, kernels)
        if verified:
            return verified.loaded(folder)
    from transformers.utils import logging as transformers_logging

    from engine.model.loading import load_model

    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()  # its lines go to the service's log
    transformers_logging.enable_propagation()
    return load_model(folder, dtype, device)


def _seconds_per_swapped_block(backend: Backend) -> float:
    """Measure the time of copying a block to the host tier; 0 without a host tier."""
    if backend.host_cache is None:
        return 0.0
    # The blocks are still empty, so all copies may have the same destination.
    copies = [Copy(1, 1)] * _MEASURED_COPIES
    seconds = []
    for _ in range(_MEASURED_COPIES):
        begun = time.perf_counter()
        backend.swap(copies, Direction.DEVICE_TO_HOST)
        if backend.cache.is_cuda:
            torch.cuda.synchronize(backend.cache.device)
        seconds.append((time.perf_counter() - begun) / len(copies))
    return median(seconds)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("device is 'cuda', but torch found no GPU")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _device_name(device: torch.device, kernels: Kernels | None) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return kernels.cpu.name if kernels else "cpu"


def _dtype(name: str, device: torch.device, kernels: Kernels | None) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" and kernels is None else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _device_blocks(settings: EngineSettings, geometry: CacheGeometry, dtype: torch.dtype) -> int:
    if settings.device_blocks:
        return settings.device_blocks
    block_bytes = geometry.block_bytes(settings.block_size, dtype)
    blocks = blocks_within(settings.cache_mib * _MIB, block_bytes)
    if not blocks:
        raise InvalidSetting(
            f"cache_mib is {settings.cache_mib}, but one block takes {block_bytes / _MIB:.1f} MiB, "
            "and the padding block as much"
        )
    if blocks > MAX_TIER_BLOCKS:
        raise InvalidSetting(
            f"cache_mib is {settings.cache_mib}, which holds {blocks} blocks of {settings.block_size} tokens; "
            f"a pool has at most {MAX_TIER_BLOCKS}: increase block_size"
        )
    return blocks
