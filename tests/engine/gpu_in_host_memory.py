"""A GPU in host memory: code for a GPU runs on a CPU, with the streams and the current device of a FakeCuda.

Tensors that are made for a GPU, or sent to it, are made on the CPU. Copies that do not block are launches on the
current stream, others are the host's own accesses: a FakeCuda finds those that nothing orders.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from tests.engine.happens_before import FakeCuda

CPU = torch.device("cpu")


class GpuInHostMemory(TorchFunctionMode):
    """Replaces GPUs by the CPU in the arguments of torch's functions, and pinned memory by other memory.

    With `cuda`, the accesses of copies are noted there: the memory of a tensor is its whole storage.
    """

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        super().__init__()
        self._cuda = cuda
        self._kept: list[torch.Tensor] = []  # so that no address is used twice

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        sent = func is torch.Tensor.to and any(_is_gpu(one) for one in args)
        args, named = tree_map_only(torch.device, _on_host, (args, kwargs or {}))
        named.pop("pin_memory", None)
        found = func(*args, **named)
        if sent and found is args[0]:
            found = found.clone()
        if self._cuda and (sent or func is torch.Tensor.copy_):
            target, source = (found, args[0]) if sent else args[:2]
            self._note(self._cuda, source, target, queued=named.get("non_blocking", False))
        return found

    def _note(self, cuda: FakeCuda, source: torch.Tensor, target: torch.Tensor, *, queued: bool) -> None:
        self._kept += [source, target]
        access = cuda.launch if queued else cuda.on_host
        access([memory_of(source)], [memory_of(target)])


def memory_of(tensor: torch.Tensor) -> int:
    """Return the name of a tensor's memory."""
    return tensor.untyped_storage().data_ptr()


def _is_gpu(value: object) -> bool:
    return isinstance(value, torch.device) and value.type == "cuda"


def _on_host(device: torch.device) -> torch.device:
    return CPU if device.type == "cuda" else device
