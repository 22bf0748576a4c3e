"""Copies tensors from mapped files to a device through a few pinned buffers.

A copy from pageable memory to a GPU goes through buffers of the driver and waits for each; pinning whole files would
take as much memory as the weights. So a tensor crosses in pieces: while one piece is on its way, the next is read.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

import torch

PIECE_BYTES = 32 << 20
_PIECES = 2

Wait = Callable[[], object]
# Queues a copy of a buffer's piece into device memory, perhaps of another type; the result waits until the piece has
# been read.
Send = Callable[[torch.Tensor, torch.Tensor], Wait]


@dataclass
class _Buffer:
    memory: torch.Tensor
    wait: Wait


class Staging:
    """Two host buffers of `piece_bytes` for each thread that copies at the same time: all the memory that it takes."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], send: Send, piece_bytes: int = PIECE_BYTES) -> None:
        """`allocate` returns a uint8 buffer of that many bytes, in memory that the device reads directly."""
        self._allocate = allocate
        self._send = send
        self._piece_bytes = piece_bytes
        self._unused: deque[tuple[_Buffer, ...]] = deque()

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy of a host tensor, perhaps a slice, to a contiguous device tensor of equal shape.

        The source may be dropped at once. A buffer is not written before its last piece has been sent.
        """
        buffers = self._take()
        for (read, written), buffer in zip(_pieces(source, target, self._piece_bytes), cycle(buffers), strict=False):
            buffer.wait()
            memory = buffer.memory[: read.nbytes].view(read.dtype).view(read.shape)
            memory.copy_(read)
            buffer.wait = self._send(memory, written)
        self._unused.append(buffers[::-1])  # small tensors take turns

    def finish(self) -> None:
        """Wait for all copies, once no thread copies any more."""
        for buffers in self._unused:
            for buffer in buffers:
                buffer.wait()

    def _take(self) -> tuple[_Buffer, ...]:
        try:
            return self._unused.pop()  # atomic, so no other thread has them
        except IndexError:
            return tuple(_Buffer(self._allocate(self._piece_bytes), lambda: None) for _ in range(_PIECES))


def _pieces(source: torch.Tensor, target: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of both of at most `size` bytes: whole rows where those of the source are apart in memory."""
    if source.is_contiguous():
        source, target = source.reshape(-1), target.view(-1)
    row_bytes = source.nbytes // max(1, len(source))
    if row_bytes > size and source.dim() > 1:
        for row, place in zip(source, target, strict=True):
            yield from _pieces(row, place, size)
        return
    step = max(1, size // max(1, row_bytes))
    for start in range(0, len(source), step):
        yield source[start : start + step], target[start : start + step]


def cuda_staging(device: torch.device, piece_bytes: int = PIECE_BYTES) -> Staging:
    """Return the staging of a GPU, on its current stream: kernels launched later see the weights."""

    def send(piece: torch.Tensor, target: torch.Tensor) -> Wait:
        # Converted on the device: torch would convert on the host, into memory that is not pinned.
        target.copy_(piece.to(device, non_blocking=True) if piece.dtype != target.dtype else piece, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(torch.cuda.current_stream(device))
        return sent.synchronize

    return Staging(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), send, piece_bytes)
