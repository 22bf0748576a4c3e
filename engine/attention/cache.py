"""Memory of the KV cache: one tensor, block-major, so that one block of all layers is contiguous.

Shape `[device_blocks + 1, elements]`. A block has K, then V, of each layer; layers may differ in their heads, and K and
V in the size of a head. The attention backend defines the order of elements inside K or V of a (block, layer): its part
shape. Block 0 is never allocated and takes the writes of padding. The host tier is a second tensor of the same shape,
except for the number of blocks; its block 0 is unused, so that ids are rows.

A cache of type int8 has codes, and a scale for each token and head of K and of V inside the same block: see `codes`.
"""

import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from blocks import Copy
from engine.attention.host_memory import CudaHostMemory, registered_zeros

SCALE_BYTES = 2  # bfloat16
_KINDS = string.digits + string.ascii_letters


class LayerShape(NamedTuple):
    """The shape of one layer's K and V: its KV heads, and the elements of K and of V in each head.

    A query sees the latest `window` tokens, or all if it is 0; if `chunked`, those of its chunk of `window` tokens.
    """

    kv_heads: int
    key_size: int
    value_size: int
    window: int = 0
    chunked: bool = False


@dataclass(frozen=True)
class CacheGeometry:
    """KV cache dimensions of a model: the shape of each layer."""

    layers: tuple[LayerShape, ...]

    @classmethod
    def uniform(cls, layers: int, kv_heads: int, head_size: int) -> "CacheGeometry":
        """Return the geometry of equal layers, whose K and V have the same size."""
        return cls((LayerShape(kv_heads, head_size, head_size),) * layers)

    @property
    def largest_head(self) -> int:
        """Elements of the largest head."""
        return max((max(one.key_size, one.value_size) for one in self.layers), default=0)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block of a cache of this type: K and V of all layers, int8 with its scales."""
        heads = (
            one.kv_heads * head_elements(size, block_size, dtype)
            for one in self.layers
            for size in (one.key_size, one.value_size)
        )
        return sum(heads) * dtype.itemsize

    def of_rank(self, ranks: int) -> "CacheGeometry":
        """Return the dimensions of one of several ranks that share the KV heads of each layer."""
        return CacheGeometry(tuple(one._replace(kv_heads=one.kv_heads // ranks) for one in self.layers))


def head_elements(size: int, block_size: int, dtype: torch.dtype) -> int:
    """Return the elements of one head's K or V in a block; those of int8 are bytes, which include the scales."""
    return block_size * (size + (SCALE_BYTES if dtype == torch.int8 else 0))


class Part(NamedTuple):
    """K or V of one layer inside a block: its first element, and its shape."""

    offset: int
    shape: tuple[int, ...]

    def of(self, cache: torch.Tensor) -> torch.Tensor:
        """Return the part of all blocks, `[blocks, *shape]`, which shares the cache's memory."""
        return cache[:, self.offset : self.offset + prod(self.shape)].view(len(cache), *self.shape)


# Returns the shape of K or V in one block, from KV heads and elements of a head.
PartShape = Callable[[int, int], tuple[int, ...]]


@dataclass(frozen=True)
class CacheLayout:
    """Places of K and V of each layer inside a block of `elements`, which may end with unused ones."""

    parts: tuple[tuple[Part, Part], ...]
    elements: int

    @classmethod
    def of(cls, geometry: CacheGeometry, part_shape: PartShape, multiple: int = 1) -> "CacheLayout":
        """Place the parts one after the other: K, then V, of each layer. The size is a multiple of `multiple`."""
        offset = 0
        parts = []
        for one in geometry.layers:
            key = Part(offset, part_shape(one.kv_heads, one.key_size))
            value = Part(offset + prod(key.shape), part_shape(one.kv_heads, one.value_size))
            offset = value.offset + prod(value.shape)
            parts.append((key, value))
        return cls(tuple(parts), -(-offset // multiple) * multiple)

    def shape(self, usable_blocks: int) -> tuple[int, int]:
        """Return the shape of a tier of usable blocks."""
        return (usable_blocks + 1, self.elements)

    def description(self) -> str:
        """Describe the parts of all layers in one line, such as `K (16, 3, 64) V (16, 3, 64): 0000`."""
        shapes = [(key.shape, value.shape) for key, value in self.parts]
        kinds = list(dict.fromkeys(shapes))
        numbers = "".join(_KINDS[kinds.index(one) % len(_KINDS)] for one in shapes)
        return f"{', '.join(f'K {key} V {value}' for key, value in kinds)}: {numbers}"


def make_cache(layout: CacheLayout, device_blocks: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate the cache of `device_blocks` usable blocks, filled with zeros."""
    return torch.zeros(layout.shape(device_blocks), dtype=dtype, device=device)


def make_host_cache(
    layout: CacheLayout, host_blocks: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Allocate the host tier of a cache on `device`: `host_blocks` usable blocks of zeros, None for 0 blocks.

    Pinned if the device is a GPU, because copies from pageable memory would block the computation. Raises
    HostTierUnavailable then.
    """
    if not host_blocks:
        return None
    shape = layout.shape(host_blocks)
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
