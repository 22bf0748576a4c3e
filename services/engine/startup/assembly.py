"""Assembles an engine from its settings: model, cache, backend, scheduler. Takes seconds; run it on a thread."""

import logging
import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from blocks import Copy
from engine.attention.backend import Direction
from engine.attention.declared_geometry import latent_elements
from engine.gpu.current_device import on_device
from engine.gpu.device_watch import WatchedRunner, check_of
from engine.kept.checksums import NAME
from engine.kept.kept_memory import KeptMemory
from engine.kept.seal_writer import SealWriter
from engine.kinds.kinds_backend import CachingBackend, KindsBackend
from engine.model.decoder import Decoder
from engine.model.loaded import LoadedModel, dtype_name, fingerprint_of, with_kv_dtype
from engine.native.decoder import NativeDecoder
from engine.native.formats.gguf.file import gguf_of
from engine.native.formats.image_text import image_text_type
from engine.native.kernels import Kernels, return_freed_memory
from engine.proof.block_proof import BlockProof
from engine.proof.closeness import close_blocks
from engine.run.runner import ModelRunner
from engine.run.samplers import sampler_for
from engine.schedule.capacity import Capacity
from engine.schedule.pool.preemption import PreemptionCosts
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Runner
from services.engine.kept.digests import FileDigests, ModelFiles
from services.engine.kept.keeping import Keeping, identity_of, keep, kept_file
from services.engine.kept.memory_file import MemoryFile
from services.engine.kept.places import kept_path
from services.engine.settings import OFF, EngineSettings
from services.engine.startup.backends import Backend, BackendChoice, BackendOptions, check_kv_dtype, choose_backend
from services.engine.startup.cpu_quota import threads_within_quota
from services.engine.startup.device import (
    capacity_of,
    check_declared_chunks,
    device_name,
    device_of,
    dtype_of,
    kinds_of,
    kv_dtype_of,
)
from services.engine.startup.end_tokens import end_tokens
from services.engine.startup.gpu_pool import CudaMemory, PoolMeasurement, is_measured, run_sampled
from services.engine.startup.native_kernels import kernels_for
from services.engine.startup.verified_models import VerifiedModel, VerifiedModels
from services.engine.startup.weights import kept, packed_format, weights_to_load

_MIB = 1 << 20
_MEASURED_COPIES = 8
# Variable of transformers: no threads read ahead, so stacked tensors leave their memory to those of the next layer.
_ONE_TENSOR_AT_A_TIME = "HF_DEACTIVATE_ASYNC_LOAD"

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class EngineParts:
    """A loaded model with its cache, ready to be connected to a block manager."""

    loaded: LoadedModel
    scheduler: Scheduler
    runner: Runner
    device: str
    recording_faults: Mapping[str, str]
    kept: Keeping | None = None
    proof: BlockProof | None = None
    ranks: None = None


def assemble(settings: EngineSettings) -> EngineParts:
    """Load the model from its folder and allocate its cache. Raises ModelUnsupported or InvalidSetting."""
    torch.set_num_threads(settings.threads or threads_within_quota(torch.get_num_threads()))
    device = device_of(settings.device)
    settings = settings.for_device(on_gpu=device.type == "cuda")
    check_kv_dtype(settings.attention_backend, kv_dtype_of(settings.kv_dtype), device)
    memory = CudaMemory(device) if device.type == "cuda" else None
    measurement = PoolMeasurement(memory) if memory and is_measured(settings) else None
    folder = Path(settings.model)
    log.info("loading %s from %s", settings.served_name(), source_of(folder), extra={"stage": "loading"})
    kept_place = _kept_place(settings, device)  # before the weights, which take long
    log_text_part(settings)
    kernels = kernels_for(settings.attention_backend, device, settings.kernels_folder)
    loaded = with_kv_dtype(_load(settings, device, kernels), kv_dtype_of(settings.kv_dtype))
    _log_loaded()
    capacity = capacity_of(settings, loaded)
    sampler = sampler_for(device, settings.max_sequences, loaded.vocabulary_size, loaded.dtype, kernels)

    limits = settings.max_sequences, settings.token_budget
    scratch = kept_place is not None
    kinds = kinds_of(settings, loaded)
    options = BackendOptions(
        settings.attention_backend, loaded, capacity, kernels, *limits, memory, scratch=scratch, kinds=kinds
    )

    def measure(backend: Backend, decoder: Decoder) -> int:
        assert measurement is not None, "the pool has no size yet"
        log.info("measuring the memory of the largest step", extra={"stage": "measurement"})
        trial = ModelRunner(loaded, backend, capacity.block_size, decoder=decoder, sampler=sampler)
        return measurement.blocks(partial(run_sampled, trial), settings, loaded, capacity)

    chosen = choose_backend(options, measure if measurement else None)
    loaded = kept(loaded, chosen.decoder, settings.weights)
    if measurement:
        capacity = replace(capacity, device_blocks=len(chosen.backend.cache) - 1)
    if kernels and settings.kernels_folder and loaded.model and _is_from_files(chosen.decoder):
        _verified(settings, loaded.weights).add(folder, kernels, VerifiedModel.of(loaded))
    costs = PreemptionCosts(seconds_per_swapped_block(chosen.backend))  # before blocks that must not be overwritten
    computed_by, checksum = _computed_by(chosen, kernels), _checksum(settings, device)
    kept_blocks = _kept(kept_place, settings, loaded, capacity, chosen, computed_by, checksum) if kept_place else None
    withheld = kept_blocks.report.withheld if kept_blocks else ((),)
    order = {"ahead": chosen.ahead, "counts_tokens": sampler.counts_tokens}
    scheduler = Scheduler(capacity, settings.limits(), costs, withheld=withheld, **order)
    runner = ModelRunner(
        loaded,
        chosen.backend,
        capacity.block_size,
        decoder=chosen.decoder,
        clock=time.monotonic,
        sampler=sampler,
    )
    return_freed_memory()
    name = device_name(device, kernels)
    log_pool(capacity, chosen.of_kinds, name)
    log_formats(settings, loaded)
    log_latents(loaded)
    watched = WatchedRunner(runner, check_of(device))
    parts = with_end_tokens(loaded, settings), scheduler, watched, name, chosen.recording_faults
    return EngineParts(*parts, kept_blocks, _proof(settings, chosen, kept_blocks, checksum))


def _log_loaded() -> None:
    """Log that the weights are loaded, and how many threads a CPU computes with."""
    threads = torch.get_num_threads()
    extra = {"stage": "decoder", "threads": threads}
    log.info("the weights are loaded; building the decoder, threads: %d", threads, extra=extra)


def _is_from_files(decoder: Decoder) -> bool:
    return isinstance(decoder, NativeDecoder) and decoder.from_files


def _checksum(settings: EngineSettings, device: torch.device) -> str:
    """Return what computes the checksums of blocks, empty without any."""
    return NAME if device.type == "cpu" and settings.checksums != OFF else ""


def _proof(
    settings: EngineSettings, chosen: BackendChoice, kept_blocks: Keeping | None, checksum: str
) -> BlockProof | None:
    """Return what compares the blocks of a CPU, None on a GPU, whose steps make their copies."""
    if chosen.ahead or not (kept_blocks or checksum):
        return None
    if kept_blocks:
        seals = kept_blocks.seals
    else:
        caches = [(backend.cache, backend.host_cache) for backend in chosen.of_kinds]
        seals = SealWriter(KeptMemory.private(caches), time.perf_counter)
    shares = settings.verify_blocks, random.random, settings.recompute_hits
    return BlockProof(chosen.of_kinds, seals, *shares, close_blocks(chosen.of_kinds))


def _kept_place(settings: EngineSettings, device: torch.device) -> tuple[MemoryFile, ModelFiles] | None:
    if (path := kept_path(settings, device.type)) is None:
        return None
    from services.models.model_store import default_cache  # not where models run without the command line's packages

    return kept_file(path), ModelFiles(Path(settings.model), FileDigests(default_cache().parent / "digests"))


def _kept(
    place: tuple[MemoryFile, ModelFiles],
    settings: EngineSettings,
    loaded: LoadedModel,
    capacity: Capacity,
    chosen: BackendChoice,
    computed_by: str,
    checksum: str,
) -> Keeping:
    file, weights = place
    identity = identity_of(loaded, weights, capacity, chosen.of_kinds, computed_by, checksum)
    return keep(file, identity, chosen.of_kinds, time.perf_counter, settings)


def _computed_by(chosen: BackendChoice, kernels: Kernels | None) -> str:
    """Describe what computes K and V: other code has other roundings."""
    parts = (
        type(chosen.of_kinds[0]).__name__,
        chosen.description,
        kernels.name if kernels else "",
        torch.get_num_threads(),
    )
    return ", ".join(map(str, parts))


def with_end_tokens(loaded: LoadedModel, settings: EngineSettings) -> LoadedModel:
    """Return the model with all tokens that its files name as ends of texts. Raises ModelUnsupported."""
    given = settings.generation_config, Path(settings.model)
    return replace(loaded, eos_token_ids=end_tokens(*given, loaded.eos_token_ids, loaded.vocabulary_size))


def source_of(folder: Path) -> Path:
    """Return what a model is loaded from: a GGUF file where it lies, or the folder.

    Raises ModelUnsupported if there are several files.
    """
    gguf = gguf_of(folder)
    return gguf.resolve() if gguf else folder


def log_text_part(settings: EngineSettings) -> None:
    """Log it if only the text part of a model is served."""
    if kind := image_text_type(Path(settings.model)):
        sentence = "%s is an image-text model (%s): only its text part is served, and requests with images are refused"
        log.info(sentence, settings.served_name(), kind)


def log_formats(settings: EngineSettings, loaded: LoadedModel) -> None:
    """Log the formats of weights and KV cache, which `auto` and the model's file have chosen."""
    formats = dtype_name(loaded.dtype), loaded.weight_format, dtype_name(loaded.cache_dtype)
    log.info("%s runs in %s with weights in %s and a KV cache in %s", settings.served_name(), *formats)


def log_latents(loaded: LoadedModel) -> None:
    """Log of a model with latent attention what a token takes in the cache, and what its latents would."""
    latents = latent_elements(loaded.model.config.get_text_config()) if loaded.model else 0
    if latents:
        expanded = loaded.geometry.block_bytes(1, loaded.cache_dtype)
        sentence = "attention is latent: K and V of all heads are cached, %d bytes a token, not the %d of its latents"
        log.info(sentence, expanded, latents * loaded.cache_dtype.itemsize)


def log_pool(capacity: Capacity, backends: Sequence[CachingBackend], device: str) -> None:
    """Log the size of the pool, which may have been measured, and the device, which `auto` has chosen."""
    whole, *windows = [one.cache.nbytes / _MIB for one in backends]
    of = " (kind all)" if windows else ""
    sentence = "the pool on %s has %d blocks of %d tokens%s: with the one for padding %.1f MiB"
    log.info(sentence, device, capacity.device_blocks, capacity.block_size, of, whole, extra={"stage": "ready"})
    sentence = "the pool has %d blocks of kind %s for what %d layers see: with the one for padding %.1f MiB"
    for kind, mebibytes in zip(capacity.windows, windows, strict=True):
        log.info(sentence, kind.device_blocks, kind.name, kind.layers, mebibytes)


def _load(settings: EngineSettings, device: torch.device, kernels: Kernels | None) -> LoadedModel:
    """Load the model, without transformers if its decoder was verified at an earlier start."""
    folder, dtype = Path(settings.model), dtype_of(settings.dtype, device, kernels)
    packed = packed_format(settings, dtype, kernels)
    if kernels and dtype == torch.bfloat16 and settings.kernels_folder:
        verified = _verified(settings, packed).find(folder, kernels)
        if verified:
            return verified.loaded(folder, packed)
    if device.type == "cuda":
        os.environ.setdefault(_ONE_TENSOR_AT_A_TIME, "1")
    from transformers.utils import logging as transformers_logging

    from engine.model.loading import load_model

    transformers_logging.disable_progress_bar()
    transformers_logging.disable_default_handler()  # its lines go to the service's log
    transformers_logging.enable_propagation()
    check_declared_chunks(settings, folder)  # before the weights, which take long
    loaded = load_model(folder, dtype, device, weights_to_load(packed), packed=bool(packed))
    return replace(loaded, weights=packed, fingerprint=fingerprint_of(folder, dtype, packed))


def _verified(settings: EngineSettings, packed: str) -> VerifiedModels:
    return VerifiedModels(Path(settings.kernels_folder), settings.kv_dtype, packed)


def seconds_per_swapped_block(backend: Backend) -> float:
    """Measure the time of copying a block of each kind to the host tier; 0 without a host tier."""
    if backend.host_cache is None:
        return 0.0
    if isinstance(backend, KindsBackend):
        return sum(map(seconds_per_swapped_block, backend.kinds))
    # The blocks are still empty, so all copies may have the same destination.
    copies = [Copy(1, 1)] * _MEASURED_COPIES
    seconds = []
    for _ in range(_MEASURED_COPIES):
        begun = time.perf_counter()
        with on_device(backend.cache.device):
            backend.swap(copies, Direction.DEVICE_TO_HOST)
        if backend.cache.is_cuda:
            torch.cuda.synchronize(backend.cache.device)
        seconds.append((time.perf_counter() - begun) / len(copies))
    return median(seconds)
