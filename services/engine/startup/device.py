"""Where a model is computed: its device and type, and what fits into its memory."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch

from blocks import WindowKind, blocks_for
from engine.attention.cache import CacheGeometry
from engine.errors import ModelUnsupported
from engine.kinds.layer_kinds import LayerKind, layer_kinds, one_kind
from engine.kinds.split import SplitSizes, host_blocks_of, split_blocks, split_memory
from engine.model.loaded import MAX_CONTEXT_TOKENS, LoadedModel
from engine.native.kernels import Kernels
from engine.schedule.capacity import Capacity
from kvmanager import limits
from kvmanager.pool_spec import MAX_TIER_BLOCKS
from services.engine.settings import EngineSettings
from services.engine.startup.decoder_check import CHECKED_TOKENS
from services.engine.startup.gpu_pool import is_measured
from services.runtime.settings import InvalidSetting

_MIB = 1024 * 1024


class Layered(Protocol):
    """A model with the shapes of its layers: a loaded one, or what its configuration says."""

    @property
    def geometry(self) -> CacheGeometry:
        """The shape of K and V of each layer."""

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sequence."""


def device_of(name: str, local_rank: int | None = None) -> torch.device:
    """Return the device that the setting names; one of several ranks on a machine has the GPU of its number there.

    Raises InvalidSetting if there is no such GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidSetting("device is 'cuda', but torch found no GPU")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if local_rank is None or name == "cpu":
        return torch.device(name)
    if local_rank >= (found := torch.cuda.device_count()):
        raise InvalidSetting(f"rank {local_rank} of this machine requires GPU {local_rank}, but torch found {found}")
    torch.cuda.set_device(local_rank)
    return torch.device(name, local_rank)


def device_name(device: torch.device, kernels: Kernels | None) -> str:
    """Return the GPU's name, or the class of the CPU's kernels."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return kernels.cpu.name if kernels else "cpu"


def dtype_of(name: str, device: torch.device, kernels: Kernels | None) -> torch.dtype:
    """Return the type that the setting names; `auto` depends on the device."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" and kernels is None else torch.bfloat16
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def kv_dtype_of(name: str) -> torch.dtype | None:
    """Return the type of the KV cache that the setting names, None for the model's."""
    return {"auto": None, "int8": torch.int8}[name]


def capacity_of(settings: EngineSettings, loaded: LoadedModel) -> Capacity:
    """Return the limits of requests, for settings of the device (`EngineSettings.for_device`).

    A pool that is measured later has a few blocks for trials. Raises InvalidSetting if the memory holds no block, or
    too many.
    """
    kinds, context = kinds_of(settings, loaded), context_tokens_of(settings, loaded)
    sequences, typical = settings.max_sequences, settings.typical_tokens or max(1, context // 2)
    sizes = SplitSizes(settings.block_size, context, settings.token_budget, sequences, min(typical, context))
    shapes = [kind.geometry(loaded.geometry) for kind in kinds]
    block_bytes = [one.block_bytes(settings.block_size, loaded.cache_dtype) for one in shapes]
    blocks = _device_blocks(settings, kinds, block_bytes, sizes)
    return Capacity(
        context_tokens=context,
        vocabulary_size=loaded.vocabulary_size,
        block_size=settings.block_size,
        device_blocks=blocks[0],
        host_blocks=settings.host_blocks,
        windows=_windows(kinds, blocks, host_blocks_of(kinds, settings.host_blocks, sizes), block_bytes),
        step_tokens=settings.token_budget,
    )


def kinds_of(settings: EngineSettings, model: Layered) -> tuple[LayerKind, ...]:
    """Return the kinds of blocks of a model's layers: one, unless the settings ask for windows and can have them.

    The settings are those of a device. Raises ModelUnsupported or InvalidSetting if its chunks cannot be served.
    """
    found = layer_kinds(model.geometry, context_tokens_of(settings, model))
    _check_chunks(settings, [kind.tokens for kind in found if kind.chunked])
    return found if len(found) > 1 and _has_kinds(settings) else one_kind(model.geometry)


def check_declared_chunks(settings: EngineSettings, folder: Path) -> None:
    """Raise as `kinds_of`, before weights are read. Loading says what is wrong with an unusable configuration."""
    from engine.attention.declared_geometry import chunks_of
    from engine.model.loaded import context_tokens
    from engine.model.text_part import folder_configuration

    chunks: list[int] = []
    with suppress(ModelUnsupported, AttributeError):
        config = folder_configuration(folder).get_text_config()
        context = _served_context(settings, context_tokens(config))
        chunks = sorted({one for one in chunks_of(config) if 0 < one < context})
    _check_chunks(settings, chunks)


def _has_kinds(settings: EngineSettings) -> bool:
    return settings.kinds == "auto" and settings.device == "cpu" and settings.tensor_parallel == 1


def _check_chunks(settings: EngineSettings, chunks: Sequence[int]) -> None:
    if chunks and not _has_kinds(settings):
        raise ModelUnsupported(
            f"its layers attend within chunks of {chunks[0]} tokens, which needs kinds of blocks: --kinds auto, on "
            "a CPU, without ranks"
        )
    if wrong := [one for one in chunks if one % settings.block_size]:
        raise InvalidSetting(
            f"block_size must divide the model's chunks of {wrong[0]} tokens, not {settings.block_size}"
        )


def context_tokens_of(settings: EngineSettings, model: Layered) -> int:
    """Return the tokens of the longest sequence that is served: its table of blocks has a limit."""
    return _served_context(settings, model.context_tokens)


def _served_context(settings: EngineSettings, declared: int) -> int:
    return min(declared, MAX_CONTEXT_TOKENS, limits.MAX_TABLE_BLOCKS * settings.block_size)


def _windows(
    kinds: Sequence[LayerKind], blocks: Sequence[int], host_blocks: Sequence[int], block_bytes: Sequence[int]
) -> tuple[WindowKind, ...]:
    columns = list(zip(kinds, blocks, host_blocks, block_bytes, strict=True))
    return tuple([kind.window(*numbers) for kind, *numbers in columns[1:]])


def _device_blocks(
    settings: EngineSettings, kinds: Sequence[LayerKind], block_bytes: Sequence[int], sizes: SplitSizes
) -> tuple[int, ...]:
    """Return the device blocks of each kind."""
    if settings.device_blocks:
        return split_blocks(kinds, settings.device_blocks, sizes)
    if is_measured(settings):
        return (blocks_for(CHECKED_TOKENS, settings.block_size),)
    split = split_memory(kinds, block_bytes, settings.cache_mib * _MIB, sizes)
    blocks = max(split)
    if not split[0]:
        raise InvalidSetting(f"cache_mib is {settings.cache_mib}, but {_least(split, block_bytes)}")
    if blocks > MAX_TIER_BLOCKS:
        raise InvalidSetting(
            f"cache_mib is {settings.cache_mib}, which holds {blocks} blocks of {settings.block_size} tokens; "
            f"a pool has at most {MAX_TIER_BLOCKS}: increase block_size"
        )
    return split


def _least(split: Sequence[int], block_bytes: Sequence[int]) -> str:
    """Say what the smallest pool takes. Kind 0 has no bytes if all layers have windows."""
    whole = f"one block takes {block_bytes[0] / _MIB:.1f} MiB, and the padding block as much" if block_bytes[0] else ""
    numbers = zip(split[1:], block_bytes[1:], strict=True)
    windows = ", ".join(f"{count} blocks of {one / _MIB:.1f} MiB" for count, one in numbers)
    return "; ".join(filter(None, (whole, windows and f"windows need {windows}")))
