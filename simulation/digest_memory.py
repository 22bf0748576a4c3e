"""The memory of blocks without K and V: a digest for each token and all before it."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

import torch

from blocks import Copy
from engine.attention.backend import Direction
from engine.attention.cache import copy_blocks, swap_blocks
from engine.schedule.request import Capacity

NOTHING = -1


class Outliving(Protocol):
    """Memory of one kind of blocks that outlives the process that writes to it."""

    @property
    def device(self) -> torch.Tensor:
        """The digests of the device: `[blocks + 1, block_size]` int64."""

    @property
    def host(self) -> torch.Tensor:
        """The digests of the host tier."""

    def stored(self, blocks: Sequence[int], *, host: bool) -> None:
        """Check blocks that were written to."""


class DigestMemory:
    """The memory of both tiers of one kind of blocks, and that of each window kind.

    A tier is `[blocks + 1, block_size]` int64 digests, one for each slot; block 0 is never used.

    The copies of a list run one after the other in random order: a device runs them at the same time, so the block
    manager promises that each order has the same result.
    """

    def __init__(self, capacity: Capacity, shared: Sequence[Outliving] = ()) -> None:
        """Start with nothing, or use the memory of each kind that another process left."""
        self._random = Random(capacity.device_blocks)
        self._shared = shared[0] if shared else None
        self.windows: list[DigestMemory] = []
        for number, kind in enumerate(capacity.windows, 1):
            device, host = kind.device_blocks, kind.host_blocks
            alone = replace(capacity, windows=(), device_blocks=device, host_blocks=host)
            self.windows.append(DigestMemory(alone, shared[number : number + 1]))
        self.device = torch.full((capacity.device_blocks + 1, capacity.block_size), NOTHING)
        self.host = torch.full((capacity.host_blocks + 1, capacity.block_size), NOTHING)
        if self._shared is not None:
            self.device, self.host = self._shared.device, self._shared.host

    @property
    def kinds(self) -> "list[DigestMemory]":
        """The memories of all kinds, kind 0 first."""
        return [self, *self.windows]

    def write(self, block: int, offset: int, digest: int) -> None:
        """Write a slot of the device."""
        self.device[block, offset] = digest
        if self._shared is not None:
            self._shared.stored((block,), host=False)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks within the device."""
        for copy in self._random.sample(copies, len(copies)):
            copy_blocks(self.device, [copy])
            if self._shared is not None:
                self._shared.stored((copy.destination,), host=False)

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy blocks to the other tier."""
        to_host = direction is Direction.DEVICE_TO_HOST
        for copy in self._random.sample(copies, len(copies)):
            swap_blocks(self.device, self.host, [copy], to_host=to_host)
            if self._shared is not None:
                self._shared.stored((copy.destination,), host=to_host)


def chain(before: int, token_ids: Sequence[int]) -> Iterator[int]:
    """Yield the digest of each token and all before it; `before` is the digest of the earlier ones, 0 without any."""
    for token in token_ids:
        before = hash((before, token))
        yield before
