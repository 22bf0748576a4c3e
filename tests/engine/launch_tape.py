"""A CUDA graph's behaviour on the CPU: launches with fixed addresses, replayed without the Python code.

Records torch operators and kernels under Triton's interpreter in order. Like a graph, a tape keeps the memory that was
allocated during the capture, and only the addresses of other memory: a replay fails if that memory was freed. Launches
that would synchronize with the device cannot be captured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

Result = TypeVar("Result")

_WARM_UP_RUNS = 1  # because libraries allocate their workspaces in the first run
_SYNCHRONIZING = {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.masked_select}
EMPTY = {
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty_strided,
}


class MemoryFreed(Exception):
    """A captured launch uses memory that was freed."""


class NotRecordable(Exception):
    """A launch would synchronize with the device."""


@dataclass(frozen=True)  # no tuple: tree_map searches tuples for tensors
class _Outside:
    """Address of a tensor that the capture did not allocate."""

    memory: StorageWeakRef
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self) -> torch.Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.memory.cdata)
        if storage is None:
            raise MemoryFreed(f"a recorded launch touches {tuple(self.size)} {self.dtype} that was freed")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Launch(NamedTuple):
    """A launch; `fresh` are the results in new memory, None if a result aliases an argument."""

    run: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    fresh: tuple[torch.Tensor | None, ...] = ()
    allocates: bool = False


class LaunchTape:
    """Captures like `engine.gpu.graphs.CudaRecorder`."""

    def __call__(self, run: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        for _ in range(_WARM_UP_RUNS):
            run()
        with recording() as play:
            result = run()
        return play, result


@contextmanager
def recording() -> Iterator[Callable[[], None]]:
    """Record the launches of the context; yields the function that replays them afterwards."""
    tape = _Tape()
    with tape, _recording_kernels(tape):
        yield tape.play


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._launches: list[_Launch] = []
        self._own: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        tensors = [one for one in tree_flatten((args, named))[0] if isinstance(one, torch.Tensor)]
        indexed_by_mask = func.overloadpacket is torch.ops.aten.index and any(
            one.dtype == torch.bool for one in tensors[1:]
        )
        if indexed_by_mask or func.overloadpacket in _SYNCHRONIZING:
            raise NotRecordable(f"{func} waits for the device")
        given = {_memory(one) for one in tensors}
        results = func(*args, **named)
        flat = [one for one in tree_flatten(results)[0] if isinstance(one, torch.Tensor)]
        fresh = tuple(None if _memory(one) in given else one for one in flat)
        recorded = [tree_map(self._recorded, part) for part in (args, named)]
        self._own.update({_memory(one): one.untyped_storage() for one in fresh if one is not None})
        self._launches.append(_Launch(func, *recorded, fresh, func.overloadpacket in EMPTY))
        return results

    def note_kernel(self, run: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self._launches.append(_Launch(run, tree_map(self._recorded, arguments), tree_map(self._recorded, named)))

    def play(self) -> None:
        for launch in self._launches:
            results = launch.run(*tree_map(_found, launch.arguments), **tree_map(_found, launch.named))
            leaves = tree_flatten(results)[0]
            for work in (one for one in leaves if isinstance(one, torch.ScriptObject)):  # of a collective
                work.wait()
            flat = [one for one in leaves if isinstance(one, torch.Tensor)]
            for memory, result in zip(launch.fresh, flat, strict=True):
                if memory is not None and launch.allocates:
                    _poison(memory)
                elif memory is not None:
                    memory.copy_(result)

    def _recorded(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or _memory(value) in self._own:
            return value
        storage = StorageWeakRef(value.untyped_storage())
        return _Outside(storage, value.storage_offset(), value.size(), value.stride(), value.dtype)


@contextmanager
def _recording_kernels(tape: _Tape) -> Iterator[None]:
    from triton.runtime.interpreter import InterpretedFunction

    plain = InterpretedFunction.run

    def run(kernel: Any, *arguments: Any, **named: Any) -> None:
        tape.note_kernel(lambda *again, **names: plain(kernel, *again, **names), arguments, named)
        with _disable_current_modes():
            plain(kernel, *arguments, **named)

    InterpretedFunction.run = run
    try:
        yield
    finally:
        InterpretedFunction.run = plain


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _found(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


def _poison(memory: torch.Tensor) -> None:
    """Fill memory that was allocated and not written yet, because other graphs may have used it."""
    memory.fill_(float("nan") if memory.is_floating_point() else torch.iinfo(memory.dtype).max)
