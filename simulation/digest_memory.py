"""The memory of blocks without K and V: a digest for each token and all before it."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Protocol

import torch

from blocks import Copy
from engine.attention.backend import Direction
from engine.attention.cache import copy_blocks, swap_blocks
from engine.schedule.capacity import Capacity

NOTHING = -1
_NO_SLOTS: frozenset[int] = frozenset()


class FlippedSlots:
    """The slots of one kind of blocks whose digests were flipped and not written since. A copy carries them along."""

    def __init__(self) -> None:
        self._slots: dict[tuple[bool, int], frozenset[int]] = {}  # by tier, True for the host tier, and block

    def add(self, host: bool, block: int, slots: Collection[int]) -> None:
        """Add slots of a block."""
        self._set((host, block), self.of(host, block).union(slots))

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._slots)

    def of(self, host: bool, block: int) -> frozenset[int]:
        """Return the flipped slots of a block."""
        return self._slots.get((host, block), _NO_SLOTS)

    def flip(self, random: Random, contents: torch.Tensor, block: int, *, host: bool) -> None:
        """Flip a bit of a block, unless it has a flipped one; `contents` are those of its tier."""
        slot, bit = random.randrange(contents.shape[1]), random.randrange(64)
        if not self.of(host, block):
            contents[block, slot] = int(contents[block, slot]) ^ (-(1 << 63) if bit == 63 else 1 << bit)
            self.add(host, block, (slot,))

    def on_write(self, block: int, slot: int) -> None:
        """Follow a digest that is written to the device."""
        if self._slots:
            self._set((False, block), self.of(False, block) - {slot})

    def on_copy(self, copy: Copy, *, from_host: bool = False, to_host: bool = False) -> None:
        """Follow a copy of a block."""
        if self._slots:
            self._set((to_host, copy.destination), self.of(from_host, copy.source))

    def clear(self) -> None:
        """Forget all: the memory is erased."""
        self._slots.clear()

    def _set(self, place: tuple[bool, int], slots: frozenset[int]) -> None:
        self._slots.pop(place, None)
        if slots:
            self._slots[place] = slots


class Outliving(Protocol):
    """Memory of one kind of blocks that outlives the process that writes to it."""

    @property
    def device(self) -> torch.Tensor:
        """The digests of the device: `[blocks + 1, block_size]` int64."""

    @property
    def host(self) -> torch.Tensor:
        """The digests of the host tier."""

    @property
    def flipped(self) -> FlippedSlots:
        """The slots whose digests were flipped."""

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
        self.flipped = FlippedSlots()
        if self._shared is not None:
            self.device, self.host = self._shared.device, self._shared.host
            self.flipped = self._shared.flipped

    @property
    def kinds(self) -> "list[DigestMemory]":
        """The memories of all kinds, kind 0 first."""
        return [self, *self.windows]

    def write(self, block: int, offset: int, digest: int) -> None:
        """Write a slot of the device."""
        self.device[block, offset] = digest
        self.flipped.on_write(block, offset)
        if self._shared is not None:
            self._shared.stored((block,), host=False)

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks within the device."""
        for copy in self._random.sample(copies, len(copies)):
            copy_blocks(self.device, [copy])
            self.flipped.on_copy(copy)
            if self._shared is not None:
                self._shared.stored((copy.destination,), host=False)

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy blocks to the other tier."""
        to_host = direction is Direction.DEVICE_TO_HOST
        for copy in self._random.sample(copies, len(copies)):
            swap_blocks(self.device, self.host, [copy], to_host=to_host)
            self.flipped.on_copy(copy, from_host=not to_host, to_host=to_host)
            if self._shared is not None:
                self._shared.stored((copy.destination,), host=to_host)


def chain(before: int, token_ids: Sequence[int]) -> Iterator[int]:
    """Yield the digest of each token and all before it; `before` is the digest of the earlier ones, 0 without any."""
    for token in token_ids:
        before = hash((before, token))
        yield before
