"""Where a model is computed: its device and type, and what fits into its memory."""

import torch

from blocks import blocks_for
from engine.attention.cache import CacheGeometry
from engine.model.loaded import MAX_CONTEXT_TOKENS, LoadedModel
from engine.model.sizing import blocks_within
from engine.native.kernels import Kernels
from engine.schedule.request import Capacity
from kvmanager import limits
from kvmanager.pool_spec import MAX_TIER_BLOCKS
from services.engine.settings import EngineSettings
from services.engine.startup.decoder_check import CHECKED_TOKENS
from services.engine.startup.gpu_pool import is_measured
from services.runtime.settings import InvalidSetting

_MIB = 1024 * 1024


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
    return Capacity(
        context_tokens=min(loaded.context_tokens, MAX_CONTEXT_TOKENS, limits.MAX_TABLE_BLOCKS * settings.block_size),
        vocabulary_size=loaded.vocabulary_size,
        block_size=settings.block_size,
        device_blocks=_device_blocks(settings, loaded.geometry, loaded.cache_dtype),
        host_blocks=settings.host_blocks,
    )


def _device_blocks(settings: EngineSettings, geometry: CacheGeometry, dtype: torch.dtype) -> int:
    if settings.device_blocks:
        return settings.device_blocks
    if is_measured(settings):
        return blocks_for(CHECKED_TOKENS, settings.block_size)
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
