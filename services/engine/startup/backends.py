"""Chooses what a model's steps are run with: the attention backend, and the decoder over it."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from blocks import blocks_for
from engine.attention import TorchBackend
from engine.attention.llama_shape import is_llama_shaped
from engine.errors import BackendUnavailable
from engine.gpu.device_watch import check_of, watched
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loading import LoadedModel
from engine.native import LARGEST_HEAD, Kernels
from engine.native.cpu_backend import CpuBackend
from engine.schedule.request import Capacity
from services.engine.startup.decoder_check import agrees, run_a_prompt_and_a_token
from services.engine.startup.native_kernels import decoder_for
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from engine.attention.flex_backend import FlexBackend
    from engine.gpu.triton_backend import TritonBackend

Backend: TypeAlias = "TorchBackend | CpuBackend | FlexBackend | TritonBackend"

log = logging.getLogger("quire.engine")


class BackendChoice(NamedTuple):
    """What runs the steps, and in words. With `ahead`, a step's launch returns before the step has ended."""

    backend: Backend
    decoder: Decoder
    words: str = "the model's modules"
    ahead: bool = False


class BackendOptions(NamedTuple):
    """What decides: the setting, the model, the sizes, the CPU's kernels if there are any, and sequences of a step."""

    attention: str
    loaded: LoadedModel
    capacity: Capacity
    kernels: Kernels | None
    max_sequences: int

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self.loaded.model.device
        return device

    @property
    def sizes(self) -> tuple[int, int, torch.dtype, torch.device, int]:
        """What backends that run anywhere are made of, after the geometry."""
        capacity = self.capacity
        return (capacity.block_size, capacity.device_blocks, self.loaded.dtype, self.device, capacity.host_blocks)


def choose(wanted: BackendOptions) -> BackendChoice:
    """Allocate the cache of the backend that is asked for, or that is the fastest here; make the decoder over it.

    Raises InvalidSetting where what is asked for cannot run.
    """
    name = _fastest(wanted) if wanted.attention == "auto" else wanted.attention
    try:
        choice = _MAKERS[name](wanted)
    except BackendUnavailable as missing:
        raise InvalidSetting(f"attention_backend is {name!r}, but {missing}") from missing
    log.info("attention is %s, and a step is run by %s", name, choice.words)
    return choice


def _fastest(wanted: BackendOptions) -> str:
    if wanted.device.type == "cuda":
        if find_spec("triton"):
            return "triton"
        log.warning("triton is not installed, so attention is torch's, which is slower")
        return "torch"
    kernels, loaded = wanted.kernels, wanted.loaded
    fast = kernels is not None and kernels.bfloat16 and loaded.dtype == torch.bfloat16
    return "cpu" if fast and loaded.geometry.head_size <= LARGEST_HEAD else "torch"


def _torch(wanted: BackendOptions) -> BackendChoice:
    loaded = wanted.loaded
    backend = TorchBackend(loaded.geometry, *wanted.sizes)
    return BackendChoice(backend, ModulesDecoder(loaded, backend))


def _flex(wanted: BackendOptions) -> BackendChoice:
    from engine.attention.flex_backend import FlexBackend

    loaded = wanted.loaded
    backend = FlexBackend(loaded.geometry, *wanted.sizes)
    decoder = ModulesDecoder(loaded, backend)
    log.info("FlexAttention's kernels are compiled, which takes some seconds, or found in torch's cache")
    run_a_prompt_and_a_token(decoder, loaded, backend)
    return BackendChoice(backend, decoder)


def _cpu(wanted: BackendOptions) -> BackendChoice:
    assert wanted.kernels is not None, "they were asked for, so they are there"
    loaded, capacity, threads = wanted.loaded, wanted.capacity, torch.get_num_threads()
    sizes = (capacity.block_size, capacity.device_blocks, loaded.dtype, capacity.host_blocks, threads)
    backend = CpuBackend(wanted.kernels, loaded.geometry, *sizes)
    decoder = decoder_for(wanted.kernels, loaded, backend, threads)
    return (
        BackendChoice(backend, decoder, "the CPU's kernels")
        if decoder
        else BackendChoice(backend, ModulesDecoder(loaded, backend))
    )


def _triton(wanted: BackendOptions) -> BackendChoice:
    if wanted.device.type != "cuda":
        raise BackendUnavailable(f"the model runs on {wanted.device.type}")
    if not find_spec("triton"):
        raise BackendUnavailable("the package triton is not installed")
    from engine.gpu.triton_backend import TritonBackend

    loaded = wanted.loaded
    backend = TritonBackend(loaded.geometry, *wanted.sizes)
    modules = ModulesDecoder(loaded, backend)
    decoder = gpu_decoder(loaded, backend, modules)
    words = "the model's modules" if decoder is modules else "few launches"
    if recorded := _recorded(decoder, wanted):
        return BackendChoice(backend, recorded, f"{words}, recorded for decoding", ahead=True)
    return BackendChoice(backend, decoder, words, ahead=True)


def gpu_decoder(loaded: LoadedModel, backend: "TritonBackend", modules: ModulesDecoder) -> Decoder:
    """Return the decoder of few launches where it computes what the model's modules do, else these."""
    from engine.gpu.llama import LlamaDecoder

    if not is_llama_shaped(loaded.model):
        return modules
    decoder = LlamaDecoder(loaded.model, backend, loaded.context_tokens)
    return decoder if agrees("the GPU's decoder", decoder, modules, loaded, backend) else modules


def _recorded(decoder: Decoder, wanted: BackendOptions) -> Decoder | None:
    """Return the decoder with its decoding steps recorded, None where they cannot be. Raises DeviceLost."""
    from engine.gpu.graphs import CudaRecorder, RecordedDecoder, batch_sizes

    capacity = wanted.capacity
    blocks = blocks_for(capacity.context_tokens, capacity.block_size)
    sizes = batch_sizes(wanted.max_sequences)
    recorder = CudaRecorder(wanted.device)
    recorded = RecordedDecoder(decoder, recorder, capacity.block_size, blocks, sizes, wanted.device)
    try:
        with watched(check_of(wanted.device)):
            recorded.prepare(lambda done, of: log.info("decoding steps are recorded: %d of %d sizes", done, of))
    except RuntimeError as failure:  # what torch raises where a launch waits for the device
        log.warning("decoding steps cannot be recorded, so each is launched anew: %s", failure)
        return None
    return recorded


_MAKERS: dict[str, Callable[[BackendOptions], BackendChoice]] = {
    "torch": _torch,
    "cpu": _cpu,
    "flex": _flex,
    "triton": _triton,
}
