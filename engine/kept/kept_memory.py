"""Kept memory: behind its header the counters, and seals and tensors of both tiers, one after the other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from engine.kept.checksums import checksum_of
from engine.kept.header import HEADER_BYTES, KeptIdentity, KeptKind, Places, header_of, places_of
from engine.kept.seals import MOST, MOST_STAMP, Seals, seal_bytes

_COUNTERS = np.dtype([("generation", np.uint64), ("resets", np.uint64), ("stamp", np.uint64)])


class Counters:
    """Numbers of a kept memory that change while it is used."""

    def __init__(self, memory: memoryview) -> None:
        self._values: npt.NDArray[Any] = np.frombuffer(memory, _COUNTERS, 1)[0:1]

    @property
    def generation(self) -> int:
        """Number of processes that have used the memory."""
        return int(self._values["generation"][0])

    @property
    def resets(self) -> int:
        """Resets of the pool: seals with another count are void."""
        return int(self._values["resets"][0])

    @resets.setter
    def resets(self, resets: int) -> None:
        self._values["resets"][0] = resets

    @property
    def stamp(self) -> int:
        """The latest stamp of a release."""
        return int(self._values["stamp"][0])

    @property
    def are_damaged(self) -> bool:
        """Whether a number is beyond all that processes and block steps can count to."""
        return self.generation >= MOST or self.resets >= MOST or self.stamp >= MOST_STAMP

    def begin(self) -> int:
        """Count a process that uses the memory from now on; return its number."""
        self._values["generation"][0] += 1
        return self.generation

    def tick_past(self, stamp: int) -> None:
        """Let the next stamp be later than this one."""
        self._values["stamp"][0] = max(int(self._values["stamp"][0]), stamp)

    def tick(self) -> int:
        """Return the next stamp of a release."""
        self._values["stamp"][0] += 1
        return int(self._values["stamp"][0])


@dataclass
class KindMemory:
    """The seals and tensors of one kind of blocks."""

    device: Seals
    host: Seals
    cache: torch.Tensor
    host_cache: torch.Tensor | None

    @classmethod
    def mapped(cls, memory: memoryview, kind: KeptKind, places: Places, dtype: torch.dtype) -> Self:
        """Take seals and tensors from their places in one memory."""
        size, device_blocks, host_blocks = kind.block_elements, kind.device_blocks, kind.host_blocks
        return cls(
            Seals(memory[places.device_seals :], device_blocks),
            Seals(memory[places.host_seals :], host_blocks),
            _tensor(memory, places.device, dtype, size, device_blocks),
            _tensor(memory, places.host, dtype, size, host_blocks) if host_blocks else None,
        )

    @classmethod
    def private(cls, cache: torch.Tensor, host_cache: torch.Tensor | None) -> Self:
        """Make seals beside tensors `[blocks + 1, elements]` that end with the process."""
        device_blocks, host_blocks = len(cache) - 1, 0 if host_cache is None else len(host_cache) - 1
        device, host = (Seals(bytearray(seal_bytes(blocks)), blocks) for blocks in (device_blocks, host_blocks))
        return cls(device, host, cache, host_cache)

    @property
    def tiers(self) -> tuple[Seals, Seals]:
        """The seals of both tiers."""
        return self.device, self.host


class KeptMemory:
    """The parts of one memory: its counters, and those of each kind of blocks."""

    def __init__(self, counters: Counters, kinds: Sequence[KindMemory], layout: int = 0) -> None:
        """Combine the parts. `layout` is a digest of how the blocks are laid out."""
        self.counters = counters
        self.kinds = list(kinds)
        for place, seals in enumerate(self._all_seals()):
            seals.layout = layout + place

    @classmethod
    def mapped(cls, memory: memoryview, identity: KeptIdentity) -> Self:
        """Take `kept_bytes(identity)` writable bytes."""
        dtype, places = getattr(torch, identity.dtype), places_of(identity)
        kinds = [KindMemory.mapped(memory, *one, dtype) for one in zip(identity.kinds, places, strict=True)]
        layout = checksum_of(header_of(identity), 0) >> 16  # with room for the places
        return cls(Counters(memory[HEADER_BYTES : HEADER_BYTES + _COUNTERS.itemsize]), kinds, layout)

    @classmethod
    def private(cls, caches: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> Self:
        """Make counters and seals of caches, device and host of each kind, that end with the process."""
        return cls(Counters(memoryview(bytearray(_COUNTERS.itemsize))), list(starmap(KindMemory.private, caches)))

    def _all_seals(self) -> Iterable[Seals]:
        return chain.from_iterable(kind.tiers for kind in self.kinds)

    def repair(self) -> int:
        """Open broken seals; return how many there were."""
        return sum(len(seals.repair(self.counters.stamp)) for seals in self._all_seals())

    @property
    def is_damaged(self) -> bool:
        """Whether counters and seals contradict each other, or no block of a kind is left."""
        counters = self.counters
        numbers = counters.resets, counters.generation, counters.stamp
        return counters.are_damaged or any(seals.are_damaged(*numbers) for kind in self.kinds for seals in kind.tiers)

    def take_over(self, generation: int) -> tuple[int, int]:
        """Let a process write from now on; return how many blocks of each tier an earlier one lost."""
        resets = self.counters.resets
        lost = [tuple(seals.settle(resets) for seals in kind.tiers) for kind in self.kinds]
        for seals in self._all_seals():
            seals.generation = generation
            self.counters.tick_past(len(seals))
        return sum(device for device, _ in lost), sum(host for _, host in lost)


def _tensor(memory: memoryview, place: int, dtype: torch.dtype, elements: int, blocks: int) -> torch.Tensor:
    shape = (blocks + 1, elements)
    if not elements:  # a kind without layers
        return torch.zeros(shape, dtype=dtype)
    size = (blocks + 1) * elements * dtype.itemsize
    return torch.frombuffer(memory[place : place + size], dtype=torch.uint8).view(dtype).view(shape)
