"""A GPU in host memory: code for a GPU runs on a CPU, with the streams and the current device of a FakeCuda.

Tensors that are made for a GPU, or sent to it, are made on the CPU. Those of kernels are launches of the current
stream and device.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

CPU = torch.device("cpu")


class GpuInHostMemory(TorchFunctionMode):
    """Replaces GPUs by the CPU in the arguments of torch's functions, and pinned memory by other memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        args, named = tree_map_only(torch.device, _on_host, (args, kwargs or {}))
        named.pop("pin_memory", None)
        return func(*args, **named)


def _on_host(device: torch.device) -> torch.device:
    return CPU if device.type == "cuda" else device
