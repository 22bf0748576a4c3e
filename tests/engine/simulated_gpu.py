"""A GPU simulated on a CPU, so that the code of a start on a GPU runs as it is, with kernels under the interpreter.

Its memory is the host's: tensors that are made for it, sent to it or computed from its tensors say that they are on it.
Streams have no effect, graphs are tapes, and its free memory follows from the tensors that exist.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from tests.engine.gpu_in_host_memory import GpuInHostMemory
from tests.engine.happens_before import FakeCuda, FakeEvent, FakeStream
from tests.engine.launch_tape import recording

GPU = torch.device("cuda", 0)
_DEVICE, _IS_CUDA = torch.Tensor.device.__get__, torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


class SimulatedGpu(GpuInHostMemory):
    """A GPU with `total` bytes, for the thread that enters it. The functions of torch.cuda see it once installed."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.total = total
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    @property
    def allocated(self) -> int:
        """Bytes of the tensors that exist."""
        self._storages = {key: one for key, one in self._storages.items() if not one[0].expired()}
        return sum(size for _, size in self._storages.values())

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Replace torch.cuda's functions."""
        cuda = FakeCuda()
        cuda.install(patch)

        class Event(FakeEvent):
            def __init__(self, **_: object) -> None:
                super().__init__(cuda)

            def elapsed_time(self, _later: FakeEvent) -> float:
                return 0.0

        functions: dict[str, Callable[..., object]] = {
            "Event": Event,
            "CUDAGraph": _Graph,
            "graph": _captured(cuda),
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "empty_cache": lambda: None,
            "get_device_name": lambda _: "a simulated GPU",
            "mem_get_info": lambda _: (self.total - self.allocated, self.total),
            "memory_allocated": lambda _: self.allocated,
            "memory_reserved": lambda _: self.allocated,
        }
        for name, function in functions.items():
            patch.setattr(torch.cuda, name, function)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _DEVICE:
            return GPU if self._holds(args[0]) else func(*args)
        if func == _IS_CUDA:
            return self._holds(args[0])
        named = kwargs or {}
        given = tree_leaves((args, named))
        devices = [one for one in given if isinstance(one, torch.device)]
        tensors = [one for one in given if isinstance(one, torch.Tensor)]
        on_gpu = devices[0].type == "cuda" if devices else any(map(self._holds, tensors))
        if func is torch.zeros and on_gpu:
            found = _untouched(*args, dtype=named["dtype"])
        else:
            found = super().__torch_function__(func, types, args, named)
        if on_gpu and not named.get("pin_memory"):
            self._hold(found)
        return found

    def _holds(self, tensor: torch.Tensor) -> bool:
        found = self._storages.get(tensor.untyped_storage()._cdata) if tensor.device.type == "cpu" else None
        return found is not None and not found[0].expired()

    def _hold(self, found: Any) -> None:
        for one in tree_leaves(found):
            if isinstance(one, torch.Tensor) and one.device.type == "cpu":
                storage = one.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()


class _Graph:
    play: Callable[[], None]

    def pool(self) -> object:
        return self

    def replay(self) -> None:
        self.play()


def _captured(cuda: FakeCuda) -> Callable[..., object]:
    @contextmanager
    def graph(captured: _Graph, pool: object, stream: FakeStream) -> Iterator[None]:
        with cuda.using(stream), recording() as captured.play:
            yield

    return graph


def _untouched(*shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in pages that take no memory until they are touched, because a pool fills the whole GPU."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    count = int(np.prod(sizes, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(*sizes)


@contextmanager
def simulated_gpu(total: int) -> Iterator[SimulatedGpu]:
    """Simulate a GPU of `total` bytes on this thread."""
    with ExitStack() as stack:
        gpu = SimulatedGpu(total)
        gpu.install(stack.enter_context(pytest.MonkeyPatch.context()))
        yield stack.enter_context(gpu)
