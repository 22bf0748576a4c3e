"""Common parts of backends whose cache is a torch tensor."""

from collections.abc import Sequence

import torch

from blocks import Copy
from engine.attention.backend import Direction
from engine.attention.cache import (
    CacheGeometry,
    CacheLayout,
    copy_blocks,
    head_elements,
    make_cache,
    make_host_cache,
    swap_blocks,
)


class TensorBackend:
    """Owns the cache, and copies its blocks. Inside a (block, layer), K and V are slot-major.

    A cache of type int8 has the bytes of `codes.packed` for each slot and head.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        block_size: int,
        device_blocks: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        host_blocks: int = 0,
    ) -> None:
        """Allocate the cache (by default on the CPU), and the host tier if it has blocks."""
        self.geometry = geometry
        self.block_size = block_size
        self._dtype = dtype
        device = device or torch.device("cpu")
        self.layout = CacheLayout.of(geometry, self.part_shape, self.block_multiple())
        self.cache = make_cache(self.layout, device_blocks, dtype, device)
        self.host_cache = make_host_cache(self.layout, host_blocks, dtype, device)

    def resize(self, device_blocks: int) -> None:
        """Replace the cache by one of another size, without its contents. Recorded steps must not use the old one."""
        dtype, device = self.cache.dtype, self.cache.device
        self.cache = torch.empty(0, dtype=dtype, device=device)  # not both at the same time
        self.cache = make_cache(self.layout, device_blocks, dtype, device)

    def use(self, cache: torch.Tensor, host_cache: torch.Tensor | None) -> None:
        """Use other tensors of the same shapes and types from now on. Recorded steps must not use the old ones."""
        self.cache, self.host_cache = cache, host_cache

    def part_shape(self, kv_heads: int, size: int) -> tuple[int, ...]:
        """Return (slots, KV heads, head size, or bytes of its codes and scale)."""
        return (self.block_size, kv_heads, head_elements(size, 1, self._dtype))

    def block_multiple(self) -> int:
        """Return what the elements of a block are a multiple of."""
        return 1

    def keys(self, layer: int) -> torch.Tensor:
        """Return K of a layer in all blocks, `[blocks, *part_shape]`, in the cache's memory."""
        return self.layout.parts[layer][0].of(self.cache)

    def values(self, layer: int) -> torch.Tensor:
        """Return V of a layer in the same way."""
        return self.layout.parts[layer][1].of(self.cache)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks within the cache, consecutive ones in one operation."""
        copy_blocks(self.cache, copies)

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy blocks to the other tier, consecutive ones in one operation."""
        assert self.host_cache is not None, "swap requires a host tier"
        swap_blocks(self.cache, self.host_cache, copies, to_host=direction is Direction.DEVICE_TO_HOST)
