"""Whether this machine can run the CPU's kernels, and whether they can run a model as a whole."""

import logging
import tempfile
import time
from pathlib import Path

import torch

from engine.model.decoder import ModulesDecoder
from engine.model.loading import LoadedModel
from engine.native import Kernels, KernelsUnavailable, NativeDecoder, build, ready_made, runs
from engine.native.cpu_backend import CpuBackend
from services.engine.startup.decoder_check import agrees
from services.runtime.settings import InvalidSetting

log = logging.getLogger("quire.engine")


def kernels_for(attention: str, device: torch.device, folder: str) -> Kernels | None:
    """Return the kernels for a device if they are wanted and can be built, compiling them into `folder` once.

    Without a folder they are compiled each time. Raises InvalidSetting where they must be used and cannot.
    """
    if attention not in ("auto", "cpu") or (attention == "auto" and device.type != "cpu"):
        return None
    if device.type != "cpu":
        raise InvalidSetting(f"attention_backend is 'cpu', but the model runs on {device.type}")
    begun = time.monotonic()
    try:
        kernels = _made(folder)
    except (KernelsUnavailable, OSError) as missing:
        if attention == "cpu":
            raise InvalidSetting(f"attention_backend is 'cpu', but its kernels cannot be built: {missing}") from missing
        log.warning("the CPU's kernels cannot be built, so attention is torch's, which is slower: %s", missing)
        return None
    log.info("the CPU's kernels are ready after %.1f s", time.monotonic() - begun)
    return kernels


def _made(folder: str) -> Kernels:
    """Compile the kernels for this very CPU, or take those that were compiled beforehand for CPUs like it."""
    try:
        return Kernels(build(Path(folder))) if folder else _compiled_anew()
    except KernelsUnavailable as missing:
        try:
            return Kernels(ready_made.find())
        except KernelsUnavailable as neither:
            raise KernelsUnavailable(f"{missing}, and {neither}") from missing


def _compiled_anew() -> Kernels:
    with tempfile.TemporaryDirectory() as folder:
        return Kernels(build(Path(folder)))  # once it is loaded, its file is not needed


def decoder_for(kernels: Kernels, loaded: LoadedModel, backend: CpuBackend, threads: int) -> NativeDecoder | None:
    """Return what runs a model's steps as a whole, None where its modules do that one by one.

    The modules' own weights are given up then. The first blocks of the cache are written: nobody may hold any yet.
    """
    if not (kernels.bfloat16 and loaded.dtype == torch.bfloat16 and runs(loaded.model)):
        return None
    decoder = NativeDecoder(kernels, loaded.model, backend.view, loaded.context_tokens, threads)
    if not agrees("the CPU's decoder", decoder, ModulesDecoder(loaded, backend), loaded, backend):
        return None
    for parameter in loaded.model.parameters():
        parameter.data = torch.empty(0, dtype=parameter.dtype)
    return decoder
