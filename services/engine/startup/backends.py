"""Selects the attention backend, and the decoder over it."""

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from blocks import blocks_for
from engine.attention import TorchBackend
from engine.attention.llama_shape import is_llama_shaped
from engine.attention.tensor_backend import TensorBackend
from engine.errors import BackendUnavailable, HostTierUnavailable
from engine.gpu.device_watch import check_of, watched
from engine.model.decoder import Decoder, ModulesDecoder
from engine.model.loaded import LoadedModel
from engine.native.cpu_backend import CpuBackend
from engine.native.kernels import MAX_HEAD_SIZE, PACKED_SIZE, Kernels, populate
from engine.schedule.request import Capacity
from services.engine.settings import CODED_BACKENDS
from services.engine.startup.decoder_check import matches, replays, replays_prompts, run_behind_prefix, warm_up
from services.engine.startup.native_kernels import decoder_for
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from engine.attention.flex_backend import FlexBackend
    from engine.gpu.graphs import Recorder
    from engine.gpu.llama import LlamaDecoder
    from engine.gpu.piecewise import PiecewiseDecoder
    from engine.gpu.triton_backend import TritonBackend

Backend: TypeAlias = "TorchBackend | CpuBackend | FlexBackend | TritonBackend"

# After it no further size of prompts is recorded.
_RECORDING_SECONDS = 60.0
# The recorded batch of three sequences has padding.
_COMPARED_SEQUENCES = 3

# Returns the blocks of the pool for a backend with a decoder.
Measure: TypeAlias = "Callable[[Backend, Decoder], int]"

log = logging.getLogger("quire.engine")


class NotRecorded(Exception):
    """Decoding steps cannot be recorded; the message says why."""


class BackendChoice(NamedTuple):
    """A backend, its decoder, and a description. With `ahead`, a step's launch returns before the step has ended."""

    backend: Backend
    decoder: Decoder
    description: str = "the model's modules"
    ahead: bool = False


class BackendOptions(NamedTuple):
    """Inputs of the selection: setting, model, its sizes, the CPU kernels if available, and the limits of a step."""

    attention: str
    loaded: LoadedModel
    capacity: Capacity
    kernels: Kernels | None
    max_sequences: int
    token_budget: int

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.loaded.device

    @property
    def sizes(self) -> tuple[int, int, torch.dtype, torch.device, int]:
        """Arguments of the portable backends, after the geometry."""
        capacity = self.capacity
        return (capacity.block_size, capacity.device_blocks, self.loaded.cache_dtype, self.device, capacity.host_blocks)


def choose_backend(options: BackendOptions, measure: "Measure | None" = None) -> BackendChoice:
    """Allocate the cache of the requested backend, or of the fastest available one, and make its decoder.

    `measure` finds the number of blocks of a pool whose cache is only large enough for trials; then steps are recorded.
    Raises InvalidSetting if the requested backend cannot run.
    """
    name = _fastest(options) if options.attention == "auto" else options.attention
    choice = _DECODERS[name](options, _allocate(name, options))
    if measure:
        assert isinstance(choice.backend, TensorBackend), "those of GPUs are"
        blocks = measure(choice.backend, choice.decoder)
        log.info("allocating a pool of %d blocks", blocks, extra={"stage": "pool"})
        choice.backend.resize(blocks)
    if name == "triton":
        choice = _recorded(options, choice)
    log.info("attention backend: %s; steps run by %s", name, choice.description)
    return choice


def _fastest(options: BackendOptions) -> str:
    if options.device.type == "cuda":
        if find_spec("triton"):
            return "triton"
        log.warning("triton is not installed; falling back to torch's attention, which is slower")
        return "torch"
    geometry, sizes = options.loaded.geometry, (options.capacity.block_size, options.loaded.geometry.head_size)
    packed = all(size % PACKED_SIZE == 0 for size in sizes) or options.loaded.dtype == torch.bfloat16
    return "cpu" if options.kernels and packed and geometry.head_size <= MAX_HEAD_SIZE else "torch"


def choose_rank_backend(options: BackendOptions) -> Backend:
    """Allocate the cache of one of several ranks, whose decoder is the slice of a model.

    Raises InvalidSetting if the requested backend cannot run, or runs whole models only.
    """
    name = _fastest(options) if options.attention == "auto" else options.attention
    if name == "flex":
        raise InvalidSetting("attention_backend is 'flex', which requires a tensor_parallel of 1")
    return _allocate(name, options)


def check_kv_dtype(attention: str, kv_dtype: torch.dtype | None, device: torch.device) -> None:
    """Raise InvalidSetting if the cache of the setting's backend cannot have this type. It needs no loaded model."""
    on_gpu = "triton" if find_spec("triton") else "torch"
    name = on_gpu if attention == "auto" and device.type == "cuda" else attention
    if kv_dtype and name not in (*CODED_BACKENDS, "auto"):
        given = str(kv_dtype).removeprefix("torch.")
        raise InvalidSetting(f"kv_dtype is {given!r}, which attention_backend {name!r} does not support: use torch")


def _allocate(name: str, options: BackendOptions) -> Backend:
    check_kv_dtype(name, options.loaded.kv_dtype, options.device)
    try:
        return _BACKENDS[name](options)
    except BackendUnavailable as missing:
        raise InvalidSetting(f"attention_backend is {name!r}, but {missing}") from missing
    except HostTierUnavailable as fault:
        raise InvalidSetting(f"host_blocks is {options.capacity.host_blocks}, but {fault}") from fault


def _torch_backend(options: BackendOptions) -> TorchBackend:
    return TorchBackend(options.loaded.geometry, *options.sizes)


def _flex_backend(options: BackendOptions) -> "FlexBackend":
    from engine.attention.flex_backend import FlexBackend

    return FlexBackend(options.loaded.geometry, *options.sizes)


def _cpu_backend(options: BackendOptions) -> CpuBackend:
    assert options.kernels is not None, "the cpu backend requires them"
    loaded, capacity = options.loaded, options.capacity
    sizes = (capacity.block_size, capacity.device_blocks, loaded.dtype, capacity.host_blocks, torch.get_num_threads())
    backend = CpuBackend(options.kernels, loaded.geometry, *sizes, kv_dtype=loaded.kv_dtype)
    # Beside the loading of the weights: the system takes up to a second for a gigabyte.
    Thread(target=populate, args=(backend.cache,), name="populate", daemon=True).start()
    return backend


def _triton_backend(options: BackendOptions) -> "TritonBackend":
    if options.device.type != "cuda":
        raise BackendUnavailable(f"the model runs on {options.device.type}")
    if not find_spec("triton"):
        raise BackendUnavailable("the package triton is not installed")
    from engine.gpu.triton_backend import TritonBackend

    return TritonBackend(options.loaded.geometry, *options.sizes)


def _torch(options: BackendOptions, backend: Any) -> BackendChoice:
    return BackendChoice(backend, ModulesDecoder(options.loaded, backend))


def _flex(options: BackendOptions, backend: Any) -> BackendChoice:
    decoder = ModulesDecoder(options.loaded, backend)
    log.info("compiling FlexAttention's kernels, which takes some seconds unless torch has cached them")
    warm_up(decoder, options.loaded, backend)
    return BackendChoice(backend, decoder)


def _cpu(options: BackendOptions, backend: Any) -> BackendChoice:
    assert options.kernels is not None, "the cpu backend requires them"
    decoder = decoder_for(options.kernels, options.loaded, backend, torch.get_num_threads())
    return (
        BackendChoice(backend, decoder, "the CPU's kernels")
        if decoder
        else BackendChoice(backend, ModulesDecoder(options.loaded, backend))
    )


def _triton(options: BackendOptions, backend: Any) -> BackendChoice:
    modules = ModulesDecoder(options.loaded, backend)
    decoder = gpu_decoder(options.loaded, backend, modules)
    description = "the model's modules" if decoder is modules else "few launches"
    return BackendChoice(backend, decoder, description, ahead=True)


def _recorded(options: BackendOptions, choice: BackendChoice) -> BackendChoice:
    """Return the choice with recorded decoding steps, and with recorded pieces of prompts, as far as possible."""
    from engine.gpu.graphs import CudaRecorder
    from engine.gpu.llama import LlamaDecoder

    log.info("recording steps", extra={"stage": "recording"})
    launched, recorder = choice.decoder, CudaRecorder(options.device)
    recorded = recorded_decoder(launched, options, choice.backend, recorder)
    if recorded is None:
        return choice
    choice = choice._replace(decoder=recorded, description=f"{choice.description}, recorded for decoding")
    if not isinstance(launched, LlamaDecoder):
        return choice
    pieces = recorded_pieces(launched, recorded, options, choice.backend, recorder)
    if pieces is None:
        return choice
    tokens = pieces.captured[-1]
    return choice._replace(decoder=pieces, description=f"{choice.description} and for prompts of up to {tokens} tokens")


def gpu_decoder(loaded: LoadedModel, backend: "TritonBackend", modules: ModulesDecoder) -> Decoder:
    """Return the fused GPU decoder if it matches the model's modules, otherwise the modules."""
    from engine.gpu.llama import LlamaDecoder

    if not is_llama_shaped(loaded.model):
        return modules
    decoder = LlamaDecoder(loaded.model, backend, loaded.context_tokens)
    return decoder if matches("the GPU's decoder", decoder, modules, loaded, backend) else modules


def recorded_decoder(
    decoder: Decoder, options: BackendOptions, backend: Backend, recorder: "Recorder | None" = None
) -> Decoder | None:
    """Return the decoder with recorded decoding steps; None if recording fails, or if their logits are not its own.

    `recorder` defaults to a new one. Raises DeviceLost.
    """
    try:
        return record_decoder(decoder, options, backend, recorder)
    except NotRecorded as failure:
        log.warning("decoding steps cannot be recorded, so each one is launched anew: %s", failure)
        return None


def record_decoder(
    decoder: Decoder, options: BackendOptions, backend: Backend, recorder: "Recorder | None" = None
) -> Decoder:
    """Return the decoder with recorded decoding steps. Raises NotRecorded with the reason, or DeviceLost.

    `recorder` defaults to a new one.
    """
    from engine.gpu.graphs import CudaRecorder, RecordedDecoder, batch_sizes

    capacity = options.capacity
    blocks = blocks_for(capacity.context_tokens, capacity.block_size)
    sizes = batch_sizes(options.max_sequences)
    record = recorder or CudaRecorder(options.device)
    run_behind_prefix(decoder, options.loaded, backend)
    try:
        with watched(check_of(options.device)):
            recorded = RecordedDecoder(decoder, record, capacity.block_size, blocks, sizes, options.device)
            recorded.prepare(lambda done, of: log.info("recorded decoding steps: %d of %d sizes", done, of))
            same = replays(recorded, decoder, options.loaded, backend, min(_COMPARED_SEQUENCES, options.max_sequences))
    except RuntimeError as failure:  # torch raises it if a launch waits for the device
        raise NotRecorded(str(failure)) from failure
    if not same:
        raise NotRecorded("recorded steps have other logits than launched ones")
    return recorded


def recorded_pieces(
    decoder: "LlamaDecoder", decoding: Decoder, options: BackendOptions, backend: Backend, recorder: "Recorder"
) -> "PiecewiseDecoder | None":
    """Return a decoder that replays steps with prompts by pieces, and runs other steps on `decoding`.

    None if recording fails, or if the logits are not those of `decoder`. Raises DeviceLost.
    """
    from engine.gpu.piecewise import PiecewiseDecoder, step_sizes

    sizes = step_sizes(decoder.layers, decoder.matrix_elements, options.token_budget)
    until = time.monotonic() + _RECORDING_SECONDS
    try:
        with watched(check_of(options.device)):
            pieces = PiecewiseDecoder(decoder, decoding, recorder, sizes)
            pieces.prepare(
                lambda done, of: log.info("recorded pieces of prompts: %d of %d sizes", done, of),
                lambda: time.monotonic() < until,
            )
            same = replays_prompts(pieces, decoder, options.loaded, backend, pieces.captured)
    except RuntimeError as failure:
        log.warning("steps with prompts cannot be recorded, so each one is launched anew: %s", failure)
        return None
    return pieces if same else None


_BACKENDS: dict[str, Callable[[BackendOptions], Backend]] = {
    "torch": _torch_backend,
    "cpu": _cpu_backend,
    "flex": _flex_backend,
    "triton": _triton_backend,
}
_DECODERS: dict[str, Callable[[BackendOptions, Any], BackendChoice]] = {
    "torch": _torch,
    "cpu": _cpu,
    "flex": _flex,
    "triton": _triton,
}
