"""Selects the attention backend, and the decoder over it."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from blocks import blocks_for
from engine.attention import TorchBackend
from engine.attention.llama_shape import is_llama_shaped
from engine.attention.tensor_backend import TensorBackend
from engine.errors import BackendUnavailable, HostTierUnavailable
from engine.gpu.device_watch import check_of, watched
from engine.kinds.kinds_backend import KindsBackend
from engine.kinds.layer_kinds import LayerKind
from engine.model.decoder import Decoder, ModulesDecoder, row_unit
from engine.model.loaded import LoadedModel
from engine.native.cpu_backend import CpuBackend
from engine.native.kernels import MAX_HEAD_SIZE, PACKED_SIZE, Kernels, populate
from engine.schedule.capacity import Capacity
from services.engine.settings import CODED_BACKENDS
from services.engine.startup.decoder_check import (
    check_logits,
    matches,
    replays,
    replays_prompts,
    run_behind_prefix,
    warm_up,
)
from services.engine.startup.gpu_pool import DeviceMemory, recorded_sizes
from services.engine.startup.native_kernels import decoder_for
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from engine.attention.flex_backend import FlexBackend
    from engine.gpu.graphs import Recorder
    from engine.gpu.llama import LlamaDecoder
    from engine.gpu.piecewise import PiecewiseDecoder
    from engine.gpu.triton_backend import TritonBackend

OneKind: TypeAlias = "TorchBackend | CpuBackend | FlexBackend | TritonBackend"
Backend: TypeAlias = "OneKind | KindsBackend[OneKind]"

# After it no further size of prompts is recorded.
_RECORDING_SECONDS = 60.0
# The recorded batch of three sequences has padding.
_COMPARED_SEQUENCES = 3
_GIB = 1 << 30

# Returns the blocks of the pool for a backend with a decoder.
Measure: TypeAlias = "Callable[[Backend, Decoder], int]"

log = logging.getLogger("quire.engine")


class NotRecorded(Exception):
    """Steps cannot be recorded; the message says why."""


class BackendChoice(NamedTuple):
    """A backend, its decoder, and a description. With `ahead`, a step's launch returns before the step has ended.

    `recording_faults` has the kinds of steps, `decoding` or `prompts`, that were to be recorded: why they could not be,
    empty if they were.
    """

    backend: Backend
    decoder: Decoder
    description: str = "the model's modules"
    ahead: bool = False
    recording_faults: Mapping[str, str] = MappingProxyType({})

    @property
    def of_kinds(self) -> tuple[OneKind, ...]:
        """The backend of each kind of blocks, kind 0 first."""
        return self.backend.kinds if isinstance(self.backend, KindsBackend) else (self.backend,)


class BackendOptions(NamedTuple):
    """Inputs of the selection: setting, model, its sizes, the CPU kernels if available, and the limits of a step.

    `memory` is that of a GPU, None on a CPU; `ranks` is the number of processes that compute the model. A `scratch`
    cache is only for trials: another one is used afterwards, so that its pages need no memory before they are used.
    `kinds` are the kinds of blocks, each with the number of blocks that the capacity has.
    """

    attention: str
    loaded: LoadedModel
    capacity: Capacity
    kernels: Kernels | None
    max_sequences: int
    token_budget: int
    memory: DeviceMemory | None = None
    ranks: int = 1
    scratch: bool = False
    kinds: tuple[LayerKind, ...] = ()

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.loaded.device

    @property
    def sizes(self) -> tuple[int, int, torch.dtype, torch.device, int]:
        """Arguments of the portable backends, after the geometry."""
        capacity = self.capacity
        return (capacity.block_size, capacity.device_blocks, self.loaded.cache_dtype, self.device, capacity.host_blocks)

    def of_kind(self, kind: int) -> "BackendOptions":
        """Return the options of the backend of one kind of blocks."""
        if len(self.kinds) < 2:
            return self
        geometry, capacity = self.kinds[kind].geometry(self.loaded.geometry), self.capacity
        if kind:
            window = capacity.windows[kind - 1]
            capacity = replace(capacity, device_blocks=window.device_blocks, host_blocks=window.host_blocks)
        return self._replace(loaded=replace(self.loaded, geometry=geometry), capacity=capacity)


def choose_backend(options: BackendOptions, measure: "Measure | None" = None) -> BackendChoice:
    """Allocate the cache of the requested backend, or of the fastest available one, and make its decoder.

    `measure` finds the number of blocks of a pool whose cache is only large enough for trials; then steps are recorded.
    Raises InvalidSetting if the requested backend cannot run, and ModelUnsupported if logits are not finite.
    """
    name = _fastest(options) if options.attention == "auto" else options.attention
    choice = _DECODERS[name](options, _allocate(name, options))
    check_logits(choice.decoder, options.loaded, choice.backend)
    if measure:
        assert isinstance(choice.backend, TensorBackend), "those of GPUs are"
        blocks = measure(choice.backend, choice.decoder)
        log.info("allocating a pool of %d blocks", blocks, extra={"stage": "pool"})
        choice.backend.resize(blocks)
    if name == "triton":
        from engine.gpu.graphs import CudaRecorder

        choice = record_steps(options, choice, CudaRecorder(options.device))
    log.info("attention backend: %s; steps run by %s", name, choice.description)
    return choice


def _fastest(options: BackendOptions) -> str:
    if options.device.type == "cuda":
        if find_spec("triton"):
            return "triton"
        log.warning("triton is not installed; falling back to torch's attention, which is slower")
        return "torch"
    geometry = options.loaded.geometry
    sizes = {size for one in geometry.layers for size in (one.key_size, one.value_size)} | {options.capacity.block_size}
    packed = all(size % PACKED_SIZE == 0 for size in sizes) or options.loaded.dtype == torch.bfloat16
    return "cpu" if options.kernels and packed and geometry.largest_head <= MAX_HEAD_SIZE else "torch"


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
        backends = [_BACKENDS[name](options.of_kind(kind)) for kind in range(max(1, len(options.kinds)))]
        return KindsBackend(options.kinds, backends) if len(backends) > 1 else backends[0]
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
    if not options.scratch:
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
    if decoder:
        return BackendChoice(backend, decoder, "the CPU's kernels")
    return BackendChoice(backend, ModulesDecoder(options.loaded, backend, _row_unit(options.loaded)))


def _row_unit(loaded: LoadedModel) -> int:
    """Return the tokens to whose multiples steps are padded, so that the codes of a token do not depend on the others.

    Codes round: a last bit of a sum becomes a whole step of a code, which changes the codes of all later layers.
    """
    if (loaded.dtype, loaded.kv_dtype) != (torch.float32, torch.int8):
        return 1
    if unit := row_unit(loaded.model):
        return unit
    log.warning("answers may depend on the batch: on this CPU a token's products depend on how many tokens a step has")
    return 1


def _triton(options: BackendOptions, backend: Any) -> BackendChoice:
    modules = ModulesDecoder(options.loaded, backend)
    decoder = gpu_decoder(options.loaded, backend, modules)
    description = "the model's modules" if decoder is modules else "few launches"
    return BackendChoice(backend, decoder, description, ahead=True)


def record_steps(options: BackendOptions, choice: BackendChoice, recorder: "Recorder") -> BackendChoice:
    """Return the choice with recorded decoding steps, and with recorded pieces of prompts, as far as possible.

    Steps that cannot be recorded are launched, and an error is logged. Raises DeviceLost.
    """
    from engine.gpu.llama import LlamaDecoder

    log.info("recording steps", extra={"stage": "recording"})
    launched = choice.decoder
    try:
        recorded = record_decoder(launched, options, choice.backend, recorder)
    except NotRecorded as failure:
        return choice._replace(recording_faults=_launched_anew("decoding", failure))
    description = f"{choice.description}, recorded for decoding"
    choice = choice._replace(decoder=recorded, description=description, recording_faults={"decoding": ""})
    if not isinstance(launched, LlamaDecoder):
        return choice
    try:
        pieces = recorded_pieces(launched, recorded, options, choice.backend, recorder)
    except NotRecorded as failure:
        return choice._replace(recording_faults={**choice.recording_faults, **_launched_anew("prompts", failure)})
    description = f"{description} and for prompts of up to {pieces.captured[-1]} tokens"
    return choice._replace(decoder=pieces, description=description, recording_faults={"decoding": "", "prompts": ""})


def _launched_anew(kind: str, failure: NotRecorded) -> dict[str, str]:
    """Log that steps of a kind are not recorded; return the kind with the reason."""
    named = {"decoding": "decoding steps", "prompts": "steps with prompts"}[kind]
    log.error("%s cannot be recorded, so each one is launched anew: %s", named, failure)
    return {kind: str(failure)}


def gpu_decoder(loaded: LoadedModel, backend: "TritonBackend", modules: ModulesDecoder) -> Decoder:
    """Return the fused GPU decoder if it matches the model's modules, otherwise the modules."""
    from engine.gpu.llama import LlamaDecoder

    if not is_llama_shaped(loaded.model):
        return modules
    decoder = LlamaDecoder.of_model(loaded.model, backend, loaded.context_tokens)
    return decoder if matches("the GPU's decoder", decoder, modules, loaded, backend) else modules


def record_decoder(decoder: Decoder, options: BackendOptions, backend: Backend, recorder: "Recorder") -> Decoder:
    """Return the decoder with recorded decoding steps. Raises NotRecorded with the reason, or DeviceLost."""
    from engine.gpu.graphs import RecordedDecoder, batch_sizes

    capacity = options.capacity
    blocks = blocks_for(capacity.context_tokens, capacity.block_size)
    sizes = batch_sizes(options.max_sequences)
    run_behind_prefix(decoder, options.loaded, backend)
    with _recording(options):
        recorded = RecordedDecoder(decoder, recorder, capacity.block_size, blocks, sizes, options.device)
        recorded.prepare(lambda done, of: log.info("recorded decoding steps: %d of %d sizes", done, of))
        same = replays(recorded, decoder, options.loaded, backend, min(_COMPARED_SEQUENCES, options.max_sequences))
    if not same:
        raise NotRecorded("recorded steps have other logits than launched ones")
    return recorded


def recorded_pieces(
    decoder: "LlamaDecoder", decoding: Decoder, options: BackendOptions, backend: Backend, recorder: "Recorder"
) -> "PiecewiseDecoder":
    """Return a decoder that replays steps with prompts by pieces, and runs other steps on `decoding`.

    Raises NotRecorded with the reason, or DeviceLost.
    """
    from engine.gpu.piecewise import PiecewiseDecoder, step_sizes

    sizes = step_sizes(decoder.layers, decoder.matrix_elements, options.token_budget)
    until = time.monotonic() + _RECORDING_SECONDS
    with _recording(options):
        pieces = PiecewiseDecoder(decoder, decoding, recorder, sizes)
        pieces.prepare(
            lambda done, of: log.info("recorded pieces of prompts: %d of %d sizes", done, of),
            lambda: time.monotonic() < until,
        )
        same = replays_prompts(pieces, decoder, options.loaded, backend, pieces.captured)
    if not same:
        raise NotRecorded("recorded prompts have other logits than launched ones")
    return pieces


@contextmanager
def _recording(options: BackendOptions) -> Iterator[None]:
    """Reraise torch's errors as NotRecorded, with the memory that decoding steps need and that was free before."""
    free, total = options.memory.free_and_total() if options.memory else (0, 0)
    try:
        with watched(check_of(options.device)):
            yield
    except RuntimeError as failure:  # torch raises it if a launch waits for the device, and if no memory is left
        needed = recorded_sizes(options.max_sequences, options.ranks, options.loaded, options.capacity).reserved
        memory = f"inputs and logits of decoding steps need {needed / _GIB:.2f} GiB beside their launches"
        if options.memory:
            memory += f"; {free / _GIB:.2f} of {total / _GIB:.2f} GiB were free"
        raise NotRecorded(f"{failure} ({memory})") from failure


_BACKENDS: dict[str, Callable[[BackendOptions], OneKind]] = {
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
