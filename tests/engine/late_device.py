"""A device in host memory that copies as late as possible."""

from collections import deque

import torch

from engine.model.staging import Staging, Wait

PIECE_BYTES = 1000


class FakeDevice:
    """A device in host memory that copies only when something waits for it, as late as a busy GPU could."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []
        self._queued: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        self.staging = Staging(self._allocate, self._send, PIECE_BYTES)

    def _allocate(self, size: int) -> torch.Tensor:
        self.buffers.append(torch.empty(size, dtype=torch.uint8))
        return self.buffers[-1]

    def _send(self, piece: torch.Tensor, target: torch.Tensor) -> Wait:
        self._queued.append((piece, target))
        return lambda: self._run_until(target)

    def _run_until(self, last: torch.Tensor) -> None:
        while any(target is last for _, target in self._queued):
            piece, target = self._queued.popleft()
            target.copy_(piece)
