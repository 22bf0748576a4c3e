"""Brings small lists to the device without holding anybody up.

From memory that is not pinned, a copy to a GPU waits for all that was queued before it, and whoever asks for it too:
then no step could be launched behind another. torch keeps pinned memory and hands it out again once its copy is over.
"""

from collections.abc import Sequence

import torch


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[bool], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return `[len(values)]` of a type on the device; on a GPU the copy is queued on the current stream."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Download:
    """Values of a device tensor on their way to the host."""

    def __init__(self, values: torch.Tensor) -> None:
        """Queue the copy of an integer tensor behind all that was computed until now."""
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event: torch.cuda.Event | None = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._values, self._event = values, None

    def wait(self) -> list[int]:
        """Return the values once they are there; what is queued behind them goes on meanwhile."""
        if self._event is not None:
            self._event.synchronize()
        return [int(value) for value in self._values.tolist()]
