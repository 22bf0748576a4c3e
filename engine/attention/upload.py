"""Copies between host and device that do not block.

A copy from pageable memory to a GPU waits for all queued work and blocks the caller, so no step could be launched
behind another. torch caches pinned memory and reuses it once its copy is done.
"""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

Integers = NDArray[np.int32] | NDArray[np.int64]
IntegerType = type[np.int32] | type[np.int64]

_ALIGNMENT = 16  # bytes


def upload(
    values: Sequence[int] | Sequence[float] | Integers | NDArray[np.uint8], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return the values as a tensor on the device; on a GPU the copy is queued on the current stream."""
    on_host = torch.from_numpy(values) if isinstance(values, np.ndarray) else torch.tensor(values, dtype=dtype)
    if on_host.dtype != dtype:
        on_host = on_host.to(dtype)
    if device.type == "cpu":
        return on_host
    return (on_host.pin_memory() if device.type == "cuda" else on_host).to(device, non_blocking=True)


def upload_together(arrays: Sequence[Integers], device: torch.device) -> list[torch.Tensor]:
    """Return arrays as tensors on the device, by one copy; on a CPU they share the arrays' memory.

    Each begins at a multiple of 16 bytes, because Triton compiles kernels again for tensors that do not.
    """
    if device.type == "cpu":
        return [torch.from_numpy(one) for one in arrays]
    return unpack(pack(arrays, pinned=device.type == "cuda").to(device, non_blocking=True), arrays)


def pack(arrays: Sequence[Integers], *, pinned: bool) -> torch.Tensor:
    """Return the bytes of one-dimensional arrays, each at a multiple of 16, in one new tensor of the host."""
    places = _places(arrays)
    packed = torch.empty(places[-1], dtype=torch.uint8, pin_memory=pinned)
    on_host = packed.numpy()
    for first, one in zip(places, arrays, strict=False):
        on_host[first : first + one.nbytes] = one.view(np.uint8)
    return packed


def unpack(packed: torch.Tensor, arrays: Sequence[Integers]) -> list[torch.Tensor]:
    """Return the parts of packed arrays as views."""
    return [
        packed[first : first + one.nbytes].view(torch.int32 if one.dtype == np.int32 else torch.int64)
        for first, one in zip(_places(arrays), arrays, strict=False)
    ]


def _places(arrays: Sequence[Integers]) -> list[int]:
    """Return the first byte of each array, and the end."""
    sizes = (-(-one.nbytes // _ALIGNMENT) * _ALIGNMENT for one in arrays)
    return list(accumulate(sizes, initial=0))


class Download:
    """An asynchronous copy of a device tensor to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        """Queue the copy of an integer tensor behind all work queued so far."""
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event: torch.cuda.Event | None = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._values, self._event = values, None

    def wait(self) -> list[int]:
        """Wait for the copy and return the values; work queued later continues meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        token_ids: list[int] = self._values.tolist()
        return token_ids
