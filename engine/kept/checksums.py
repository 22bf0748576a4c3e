"""Checksums of blocks: XXH3 (https://github.com/Cyan4973/xxHash), 64 bits, at the speed of memory.

A block has one from the moment it is sealed. It is compared wherever the block's bytes have left a step and come back.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

if TYPE_CHECKING:
    import torch

NAME = "xxh3-64"
"""What computes the checksums in kept memory."""

NONE = 0
"""In place of a checksum: none was computed."""


class Checksums:
    """Computes checksums of the blocks of one tier, in host memory.

    `seconds` is the time spent.
    """

    def __init__(self, blocks: "torch.Tensor", clock: Callable[[], float] = lambda: 0.0) -> None:
        """Take `[blocks + 1, elements]`, contiguous. `clock` returns seconds of this thread's time."""
        import torch  # here, because `quire serve` reads headers without it

        size = blocks[0].numel() * blocks.itemsize
        flat = blocks.view(torch.uint8).numpy() if size else np.empty(0, np.uint8)
        self._bytes: npt.NDArray[np.uint8] = flat.reshape(len(blocks), size)
        self._clock = clock
        self.seconds = 0.0

    def of(self, block: int) -> int:
        """Return the checksum of a block's bytes, never NONE."""
        begun = self._clock()
        found = xxh3_64_intdigest(self._bytes[block]) or 1
        self.seconds += self._clock() - begun
        return found


def checksum_of(text: bytes, seed: int) -> int:
    """Return the checksum of a few bytes."""
    return xxh3_64_intdigest(text, seed)
