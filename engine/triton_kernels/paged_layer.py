"""One layer of the cache in the form of the kernels: a pointer, sizes, and the distances to K and V."""

from typing import NamedTuple

import torch

from engine.attention.cache import Part


class PagedLayer(NamedTuple):
    """K and V of one layer in a contiguous cache, `[blocks, elements]`.

    From the offsets on, a block has `[kv_heads, block_size, key_size]` K, and V of `value_size`.
    """

    memory: torch.Tensor
    kv_heads: int
    block_size: int
    key_size: int
    value_size: int
    key_offset: int
    value_offset: int

    @classmethod
    def of(cls, cache: torch.Tensor, parts: tuple[Part, Part]) -> "PagedLayer":
        """Return the layer whose K and V are these parts of a block."""
        key, value = parts
        kv_heads, block_size, key_size = key.shape
        return cls(cache, kv_heads, block_size, key_size, value.shape[2], key.offset, value.offset)

    @property
    def value_distance(self) -> int:
        """Elements from K to V."""
        return self.value_offset - self.key_offset

    @property
    def distances(self) -> tuple[int, int, int]:
        """Elements from a block to the next one, from its first element to K, and from K to V."""
        return self.memory.stride(0), self.key_offset, self.value_distance
