"""CPU kernels: whether this machine can run them, and whether they can run a whole model."""

import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engine.attention.llama_shape import LlamaShape
from engine.errors import ModelUnsupported
from engine.kinds.kinds_backend import KindsBackend
from engine.kinds.layer_kinds import places_of
from engine.model.decoded_weights import decode
from engine.model.decoder import ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.native import prebuilt
from engine.native.build import build
from engine.native.cpu_backend import CpuBackend
from engine.native.cpu_class import VARIABLE, CpuClass, KernelsUnavailable, select, supported
from engine.native.decoder import NativeDecoder, runs
from engine.native.kernels import Kernels, LayerCaches, layer_caches
from engine.native.llama_weights import FileWeights, ModuleWeights
from services.engine.startup.decoder_check import matches
from services.engine.startup.weights import weights_to_load
from services.runtime.settings import InvalidSetting

log = logging.getLogger("quire.engine")


def kernels_for(attention: str, device: torch.device, folder: str) -> Kernels | None:
    """Return the CPU kernels if the settings use them and they can be built; cache them in `folder`.

    Without a folder they are compiled at every start. Raises InvalidSetting if they are required and unavailable, and
    if this CPU cannot run those of QUIRE_CPU_CLASS.
    """
    if attention not in ("auto", "cpu") or (attention == "auto" and device.type != "cpu"):
        return None
    if device.type != "cpu":
        raise InvalidSetting(f"attention_backend is 'cpu', but the model runs on {device.type}")
    begun = time.monotonic()
    try:
        kernels = load_kernels(folder)
    except (KernelsUnavailable, OSError) as missing:
        _check_optional(attention, missing)
        return None
    log.info("the CPU kernels of class %s are ready after %.1f s", kernels.cpu.name, time.monotonic() - begun)
    if kernels.cpu.name == "amx" and not kernels.tiles:
        log.warning("the system does not permit AMX; the CPU kernels use AVX512-BF16 instead")
    return kernels


def _requested_class() -> str:
    """Return QUIRE_CPU_CLASS. Raises InvalidSetting if it names no class, or none that this CPU can run."""
    name = os.environ.get(VARIABLE) or "auto"
    known = [one.name for one in supported()]
    if name not in ("auto", *known):
        raise InvalidSetting(f"{VARIABLE} must be auto or one of {', '.join(known)} on this CPU, not {name!r}")
    return name


def _check_optional(attention: str, missing: Exception) -> None:
    """Raise InvalidSetting if the kernels are required."""
    if attention == "cpu":
        raise InvalidSetting(f"attention_backend is 'cpu', but its kernels cannot be built: {missing}") from missing
    log.warning("the CPU kernels cannot be built; falling back to torch's attention, which is slower: %s", missing)


def load_kernels(folder: str) -> Kernels:
    """Load the precompiled kernels of this CPU's class, or of QUIRE_CPU_CLASS; without any, compile them.

    Raises KernelsUnavailable, InvalidSetting, and OSError if the library cannot be loaded.
    """
    cpu = select(_requested_class())
    try:
        return Kernels(prebuilt.find(cpu), cpu)
    except (KernelsUnavailable, OSError) as missing:  # OSError: made for a newer system
        try:
            return Kernels(_built(Path(folder), cpu), cpu) if folder else _build_temporary(cpu)
        except KernelsUnavailable as failed:
            raise KernelsUnavailable(f"{failed}, and {missing}") from failed


def _layer_caches(backend: "CpuBackend | KindsBackend[CpuBackend]") -> LayerCaches:
    if isinstance(backend, KindsBackend):
        return layer_caches([one.view for one in backend.kinds], places_of(backend.layer_kinds))
    return backend.layer_caches


def _build_temporary(cpu: CpuClass) -> Kernels:
    with tempfile.TemporaryDirectory() as folder:
        return Kernels(_built(Path(folder), cpu), cpu)  # the file is not needed after loading


def _built(folder: Path, cpu: CpuClass) -> Path:
    return build(folder, cpu, lambda: log.info("compiling the CPU kernels of class %s, once", cpu.name))


def decoder_for(
    kernels: Kernels, loaded: LoadedModel, backend: "CpuBackend | KindsBackend[CpuBackend]", threads: int
) -> NativeDecoder | None:
    """Return the decoder that runs whole steps, or None if the model's modules have to run them.

    Frees the modules' own weights. Overwrites the first blocks of the cache, which must be free.
    """
    # Tables of rotations have a row for each position: no sequence is longer than the pool.
    positions = min(loaded.context_tokens, (len(backend.cache) - 1) * backend.block_size)
    sizes = (_layer_caches(backend), positions, threads)
    how = weights_to_load(loaded.weights)
    if loaded.shape is not None and loaded.folder is not None:
        return _from_files(kernels, loaded.shape, FileWeights(loaded.folder, how), *sizes)
    if not (loaded.dtype == torch.bfloat16 and runs(loaded.model)):
        return None
    shape = LlamaShape.of(loaded.model)
    try:
        decoder = _from_files(kernels, shape, FileWeights(loaded.folder, how), *sizes)
    except ModelUnsupported:  # other names or file formats
        decode(loaded.model)
        decoder = NativeDecoder(kernels, shape, ModuleWeights(loaded.model), *sizes)
    if not matches("the CPU's decoder", decoder, ModulesDecoder(loaded, backend), loaded, backend):
        return None
    for parameter in loaded.model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return decoder


def _from_files(kernels: Kernels, shape: LlamaShape, weights: FileWeights, *sizes: Any) -> NativeDecoder:
    decoder = NativeDecoder(kernels, shape, weights, *sizes)
    if dense := weights.dequantized:
        sentence = (
            "%d quantized matrices are dequantized to bfloat16, as no kernel multiplies them as they are: %s, ..."
        )
        log.info(sentence, len(dense), dense[0])
    return decoder
