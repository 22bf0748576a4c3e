"""One layer of the cache in the form of the kernels: a pointer, and the strides of blocks, layers, K and V."""

from typing import NamedTuple

import torch


class PagedLayer(NamedTuple):
    """A layer of a contiguous cache of shape `[blocks, layers, 2, kv_heads, block_size, head_size]`."""

    memory: torch.Tensor
    number: int

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        return self.memory.shape[3]

    @property
    def block_size(self) -> int:
        """Slots of a block."""
        return self.memory.shape[4]

    @property
    def head_size(self) -> int:
        """Elements of one head's K or V of one token."""
        return self.memory.shape[5]

    @property
    def strides(self) -> tuple[int, int, int]:
        """Strides (elements) of blocks, of layers, and from K to V."""
        block, layer, value = self.memory.stride()[:3]
        return block, layer, value
