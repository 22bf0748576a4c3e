"""Memory of the host that a GPU reads and writes by its address.

torch rounds pinned memory up to a power of two, so that a tier of 33 GiB would take 64. These are pages of the system,
which CUDA pins where they are.
"""

import math
from contextlib import suppress
from ctypes import addressof, c_char
from mmap import MADV_DONTFORK, MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from typing import Protocol

import torch

from engine.errors import HostTierUnavailable

# Flags of cudaHostRegister: pinned for all devices, and reachable by kernels.
_PORTABLE, _MAPPED = 1, 2


class HostMemory(Protocol):
    """Pins pages of the host for a device."""

    def register(self, address: int, size: int) -> None:
        """Pin `size` bytes, whole pages. Raises HostTierUnavailable."""

    def unregister(self, address: int) -> None:
        """Wait for the device, then release the pages that were pinned at an address."""


class CudaHostMemory:
    """Pins pages for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, size: int) -> None:
        """See HostMemory."""
        with torch.cuda.device(self._device):
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            fault = cudart.cudaHostRegister(address, size, _PORTABLE | _MAPPED)
        if int(fault):
            reason = cudart.cudaGetErrorString(fault)
            raise HostTierUnavailable(f"CUDA cannot pin the tier's {_gib(size)} of host memory: {reason}")

    def unregister(self, address: int) -> None:
        """See HostMemory."""
        torch.cuda.synchronize(self._device)
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class _Pages(mmap):
    """Pages that are unregistered before they are unmapped, when nothing refers to them any more."""

    _address = 0
    _memory: HostMemory

    def register(self, memory: HostMemory) -> None:
        self.madvise(MADV_DONTFORK)  # a write after a fork would move a page away from the device
        address = addressof(c_char.from_buffer(self))
        memory.register(address, len(self))
        self._memory, self._address = memory, address

    def __del__(self) -> None:
        if self._address:
            with suppress(Exception):  # a lost device, or the end of the process
                self._memory.unregister(self._address)


def registered_zeros(shape: tuple[int, ...], dtype: torch.dtype, memory: HostMemory) -> torch.Tensor:
    """Return zeros in pages that stay pinned as long as the tensor, or a view of it, exists.

    Takes the tensor's bytes, rounded up to whole pages. Raises HostTierUnavailable.
    """
    size = math.prod(shape) * dtype.itemsize
    try:
        pages = _Pages(-1, math.ceil(size / PAGESIZE) * PAGESIZE, MAP_PRIVATE | MAP_ANONYMOUS)
    except (OSError, OverflowError) as fault:
        raise HostTierUnavailable(f"the system does not give the tier {_gib(size)} of host memory: {fault}") from fault
    pages.register(memory)
    return torch.frombuffer(pages, dtype=torch.uint8, count=size).view(dtype).view(shape)


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
