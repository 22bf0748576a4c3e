"""Copies tensors from mapped files to a device through a few pinned buffers.

A copy from pageable memory to a GPU goes through buffers of the driver and waits for each; pinning whole files would
take as much memory as the weights. So a tensor crosses in pieces: while one piece is on its way, the next is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

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
    """Two host buffers of `piece_bytes` each, which is all the host memory that it takes."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], send: Send, piece_bytes: int = PIECE_BYTES) -> None:
        """`allocate` returns a uint8 buffer of that many bytes, in memory that the device reads directly."""
        self._send = send
        self._buffers = [_Buffer(allocate(piece_bytes), lambda: None) for _ in range(_PIECES)]
        self._turn = 0

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Queue the copy of a contiguous host tensor to a contiguous device tensor of equal shape.

        The source may be dropped at once. A buffer is not written before its last piece has been sent.
        """
        read, written = source.reshape(-1), target.view(-1)
        step = max(1, len(self._buffers[0].memory) // source.element_size())
        for start in range(0, len(read), step):
            self._turn = (self._turn + 1) % _PIECES
            buffer = self._buffers[self._turn]
            buffer.wait()
            piece = read[start : start + step]
            memory = buffer.memory[: piece.nbytes].view(source.dtype)
            memory.copy_(piece)
            buffer.wait = self._send(memory, written[start : start + step])

    def finish(self) -> None:
        """Wait for all copies."""
        for buffer in self._buffers:
            buffer.wait()


def cuda_staging(device: torch.device) -> Staging:
    """Return the staging of a GPU, on its current stream: kernels launched later see the weights."""

    def send(piece: torch.Tensor, target: torch.Tensor) -> Wait:
        # Converted on the device: torch would convert on the host, into memory that is not pinned.
        target.copy_(piece.to(device, non_blocking=True) if piece.dtype != target.dtype else piece, non_blocking=True)
        sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        sent.record(torch.cuda.current_stream(device))
        return sent.synchronize

    return Staging(lambda size: torch.empty(size, dtype=torch.uint8, pin_memory=True), send)
