"""Copies tensors from mapped files to a device through a few pinned buffers.

A copy from pageable memory to a GPU goes through buffers of the driver and waits for each; pinning whole files would
take as much memory as the weights. So a tensor crosses in pieces: while one piece is on its way, the next is read.
"""

from collections import deque
from collections.abc import Callable
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
        """Queue the copy of a contiguous host tensor to a contiguous device tensor of equal shape.

        The source may be dropped at once. A buffer is not written before its last piece has been sent.
        """
        buffers = self._take()
        read, written = source.reshape(-1), target.view(-1)
        step = max(1, self._piece_bytes // source.element_size())
        for start, buffer in zip(range(0, len(read), step), cycle(buffers), strict=False):
            buffer.wait()
            piece = read[start : start + step]
            memory = buffer.memory[: piece.nbytes].view(source.dtype)
            memory.copy_(piece)
            buffer.wait = self._send(memory, written[start : start + step])
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


def cuda_staging(device: torch.device) -> Staging:
    """Return the staging of a GPU, on its current stream: kernels launched later see the weights."""

    def send(piece: torch.Tensor, target: torch.Tensor) -> Wait:
        # Converted on the device: torch would convert on the host, into memory that is not pinned.
        target.copy_(piece.to(device, non_blocking=True) if piece.dtype != target.dtype else piece, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(torch.cuda.current_stream(device))
        return sent.synchronize

    return Staging(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), send)
