"""Memory of the KV cache: one tensor, block-major, so that one block of all layers is contiguous.

Shape `[device_blocks + 1, layers, 2, *block_shape]`: index 2 is K, then V; the attention backend defines `block_shape`.
Block 0 is never allocated and takes the writes of padding. The host tier is a second tensor of the same shape, except
for the number of blocks; its block 0 is unused, so that ids are rows.

A cache of type int8 has codes, and a scale for each token and head of K and of V inside the same block: see `codes`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from blocks import Copy
from engine.attention.host_memory import CudaHostMemory, registered_zeros

SCALE_BYTES = 2  # bfloat16


@dataclass(frozen=True)
class CacheGeometry:
    """KV cache dimensions of a model: layers, KV heads, and elements of one head's K or V."""

    layers: int
    kv_heads: int
    head_size: int

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block of a cache of this type: K and V of all layers, int8 with its scales."""
        return self.layers * 2 * self.kv_heads * self.head_elements(block_size, dtype) * dtype.itemsize

    def head_elements(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the elements of one head's K or V in a block; those of int8 are bytes, which include the scales."""
        return block_size * (self.head_size + (SCALE_BYTES if dtype == torch.int8 else 0))


def make_cache(
    geometry: CacheGeometry, device_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate the cache of `device_blocks` usable blocks, filled with zeros."""
    return torch.zeros(cache_shape(geometry, device_blocks, block_shape), dtype=dtype, device=device)


def cache_shape(geometry: CacheGeometry, device_blocks: int, block_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a cache of `device_blocks` usable blocks."""
    return (device_blocks + 1, geometry.layers, 2, *block_shape)


def make_host_cache(
    geometry: CacheGeometry, host_blocks: int, block_shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Allocate the host tier of a cache on `device`: `host_blocks` usable blocks of zeros, None for 0 blocks.

    Pinned if the device is a GPU, because copies from pageable memory would block the computation. Raises
    HostTierUnavailable then.
    """
    if not host_blocks:
        return None
    shape = cache_shape(geometry, host_blocks, block_shape)
    if device.type == "cuda":
        return registered_zeros(shape, dtype, CudaHostMemory(device))
    return torch.zeros(shape, dtype=dtype)


def copy_blocks(cache: torch.Tensor, copies: Sequence[Copy]) -> None:
    """Copy whole blocks within a cache; no destination is a source."""
    for run in _runs(copies):
        cache[run.destinations].copy_(cache[run.sources])


def swap_blocks(cache: torch.Tensor, host_cache: torch.Tensor, copies: Sequence[Copy], *, to_host: bool) -> None:
    """Copy whole blocks between the tiers. On a GPU the copies are queued on the current stream."""
    source, target = (cache, host_cache) if to_host else (host_cache, cache)
    for run in _runs(copies):
        target[run.destinations].copy_(source[run.sources], non_blocking=True)


class _Run(NamedTuple):
    """Consecutive blocks copied to consecutive blocks: one contiguous range of bytes."""

    sources: slice
    destinations: slice


def _runs(copies: Sequence[Copy]) -> Iterator[_Run]:
    """Yield the copies in order, merging neighbours whose sources and destinations are both consecutive."""
    begin = 0
    for end in range(1, len(copies) + 1):
        before = copies[end - 1]
        if end == len(copies) or copies[end] != Copy(before.source + 1, before.destination + 1):
            source, destination = copies[begin]
            count = end - begin
            yield _Run(slice(source, source + count), slice(destination, destination + count))
            begin = end
