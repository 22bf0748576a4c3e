"""Common parts of backends whose cache is a torch tensor."""

from collections.abc import Sequence

import torch

from blocks import Copy
from engine.attention.backend import Direction
from engine.attention.cache import CacheGeometry, copy_blocks, make_cache, make_host_cache, swap_blocks


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
        self.cache = make_cache(geometry, device_blocks, self.block_shape(), dtype, device)
        self.host_cache = make_host_cache(geometry, host_blocks, self.block_shape(), dtype, device)

    def resize(self, device_blocks: int) -> None:
        """Replace the cache by one of another size, without its contents. Recorded steps must not use the old one."""
        dtype, device = self.cache.dtype, self.cache.device
        self.cache = torch.empty(0, dtype=dtype, device=device)  # not both at the same time
        self.cache = make_cache(self.geometry, device_blocks, self.block_shape(), dtype, device)

    def use(self, cache: torch.Tensor, host_cache: torch.Tensor | None) -> None:
        """Use other tensors of the same shapes and types from now on. Recorded steps must not use the old ones."""
        self.cache, self.host_cache = cache, host_cache

    def block_shape(self) -> tuple[int, ...]:
        """Return (slots, KV heads, head size, or bytes of its codes and scale)."""
        return (self.block_size, self.geometry.kv_heads, self.geometry.head_elements(1, self._dtype))

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks within the cache, consecutive ones in one operation."""
        copy_blocks(self.cache, copies)

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy blocks to the other tier, consecutive ones in one operation."""
        assert self.host_cache is not None, "swap requires a host tier"
        swap_blocks(self.cache, self.host_cache, copies, to_host=direction is Direction.DEVICE_TO_HOST)
