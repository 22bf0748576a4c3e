"""The GPU that a thread launches on.

torch's operators choose the device of their tensors. Triton launches on the thread's current device, and so do events
without a stream and libraries that are called by address; each thread begins with device 0.
"""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the thread's current device for the length of the context; on a CPU nothing changes."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
