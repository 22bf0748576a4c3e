"""The layout of kept memory: header, counters, seals and tensors of both tiers, one after the other."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from engine.kept.seals import MOST, MOST_STAMP, Seals, seal_bytes

FORMAT = 2
"""Version of the layout. Another one is not read."""

MAGIC = b"\x93quire kept blocks\n"
"""The start of a header, which no text has."""

_PAGE = 4096
# Large pages, of hugetlbfs and of shared memory.
_LARGE_PAGE = 2 << 20
_COUNTERS = np.dtype([("generation", np.uint64), ("resets", np.uint64), ("stamp", np.uint64)])


@dataclass(frozen=True)
class KeptIdentity:
    """What must be equal for a process to use the blocks that another one left.

    `fingerprint` is a digest of every byte of the weights and of the code that computed K and V. `shapes` describes K
    and V of the layers inside a block, as the attention backend lays them out; `dtype` is the cache's.
    """

    boot_id: str
    dtype: str
    block_size: int
    shapes: str
    block_elements: int
    device_blocks: int
    host_blocks: int
    backend: str
    fingerprint: str
    kinds: tuple[str, ...] = ("all",)
    format: int = FORMAT

    def difference(self, other: Self) -> str:
        """Return the name of the first field in which two differ, empty if they are equal."""
        own, theirs = asdict(self), asdict(other)
        return next((name for name in ("format", *own) if own[name] != theirs[name]), "")


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
        """Whether a number is beyond all that processes and Steps can count to."""
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


class KeptMemory:
    """The parts of one memory."""

    def __init__(self, memory: memoryview, identity: KeptIdentity) -> None:
        """Take `kept_bytes(identity)` writable bytes."""
        places = _Places.of(identity)
        self.counters = Counters(memory[_PAGE : _PAGE + _COUNTERS.itemsize])
        self.device = Seals(memory[places.device_seals :], identity.device_blocks)
        self.host = Seals(memory[places.host_seals :], identity.host_blocks)
        dtype = getattr(torch, identity.dtype)
        self.cache = _tensor(memory, places.device, dtype, identity, identity.device_blocks)
        self.host_cache = (
            _tensor(memory, places.host, dtype, identity, identity.host_blocks) if identity.host_blocks else None
        )

    @property
    def is_damaged(self) -> bool:
        """Whether counters and seals contradict each other, or no block is left."""
        counters = self.counters
        return counters.are_damaged or any(
            one.are_damaged(counters.resets, counters.generation, counters.stamp) for one in (self.device, self.host)
        )

    def take_over(self, generation: int) -> tuple[int, int]:
        """Let a process write from now on; return how many blocks of each tier an earlier one lost."""
        resets = self.counters.resets
        lost = self.device.settle(resets), self.host.settle(resets)
        for seals in (self.device, self.host):
            seals.generation = generation
            self.counters.tick_past(len(seals))
        return lost


@dataclass(frozen=True)
class _Places:
    """Offsets in bytes."""

    device_seals: int
    host_seals: int
    device: int
    host: int
    end: int

    @classmethod
    def of(cls, identity: KeptIdentity) -> Self:
        return cls.for_blocks(identity.device_blocks, identity.host_blocks, block_bytes(identity))

    @classmethod
    def for_blocks(cls, device_blocks: int, host_blocks: int, block: int) -> Self:
        device_seals = 2 * _PAGE
        host_seals = _aligned(device_seals + seal_bytes(device_blocks), _PAGE)
        device = _aligned(host_seals + seal_bytes(host_blocks), _LARGE_PAGE)
        host = _aligned(device + (device_blocks + 1) * block, _LARGE_PAGE)
        host_size = (host_blocks + 1) * block if host_blocks else 0
        return cls(device_seals, host_seals, device, host, _aligned(host + host_size, _LARGE_PAGE))


def block_bytes(identity: KeptIdentity) -> int:
    """Return the bytes of one block: K and V of all layers."""
    itemsize: int = getattr(torch, identity.dtype).itemsize
    return identity.block_elements * itemsize


def kept_bytes(identity: KeptIdentity) -> int:
    """Return the bytes of a whole memory."""
    return _Places.of(identity).end


def kept_bytes_for(device_blocks: int, host_blocks: int, block: int) -> int:
    """Return the bytes of a whole memory whose blocks have `block` bytes each."""
    return _Places.for_blocks(device_blocks, host_blocks, block).end


def header_of(identity: KeptIdentity) -> bytes:
    """Return the header's page; it is written last, when the rest is zeros."""
    text = MAGIC + json.dumps(asdict(identity), sort_keys=True).encode()
    assert len(text) < _PAGE, "names are short"
    return text.ljust(_PAGE, b"\0")


def is_header(page: bytes) -> bool:
    """Return whether a page is the header of a kept memory, of any version."""
    return page.startswith(MAGIC)


def read_header(page: bytes) -> KeptIdentity | None:
    """Return the identity in a header, None if this version cannot read it."""
    try:
        fields = json.loads(page[len(MAGIC) : _PAGE].rstrip(b"\0"))
        fields["kinds"] = tuple(fields["kinds"])
        return KeptIdentity(**fields)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


HEADER_BYTES = _PAGE


def _aligned(offset: int, size: int) -> int:
    return -(-offset // size) * size


def _tensor(memory: memoryview, place: int, dtype: torch.dtype, identity: KeptIdentity, blocks: int) -> torch.Tensor:
    shape = (blocks + 1, identity.block_elements)
    size = (blocks + 1) * block_bytes(identity)
    return torch.frombuffer(memory[place : place + size], dtype=torch.uint8).view(dtype).view(shape)
