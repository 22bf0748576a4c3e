"""A device whose numbers cannot be read, so that whatever would make the host wait for a GPU fails on a CPU.

Tensors on torch's meta device have shapes, but no numbers, and Triton kernels are not run. So reading a number (`item`,
`tolist`, branches on data), copies to the host, and shapes that depend on numbers (`nonzero`, masks as indices) raise
torch's errors, and blocking copies from the host raise WaitsForDevice.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UNREAD = torch.device("meta")
_COPIES = (torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.copy_)


class WaitsForDevice(Exception):
    """A GPU would have made the host wait."""


@contextmanager
def never_waiting(device: torch.device) -> Iterator[None]:
    """Run code that must not wait for UNREAD or for a GPU."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        with _no_kernels(), _NoTensorsOfLists(), _NoBlockingCopies():  # type: ignore[no-untyped-call]
            yield


class _NoBlockingCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func.overloadpacket in _COPIES and not named.get("non_blocking") and args[2:3] != (True,):
            devices = {one.device for one in tree_leaves((args, named)) if isinstance(one, torch.Tensor)}
            devices |= {torch.device(named["device"])} if named.get("device") else set()
            if len(devices) > 1:
                raise WaitsForDevice(f"{func} is a blocking copy")
        return func(*args, **named)


class _NoTensorsOfLists(TorchFunctionMode):
    # torch does not dispatch the copy in `torch.tensor`.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if (
            func in (torch.tensor, torch.as_tensor, torch.asarray)
            and torch.device(named.get("device") or "cpu") == UNREAD
        ):
            raise WaitsForDevice(f"torch.{func.__name__} copies memory that is not pinned")
        return func(*args, **named)


@contextmanager
def _no_kernels() -> Iterator[None]:
    from triton.runtime.interpreter import InterpretedFunction

    plain = InterpretedFunction.run
    InterpretedFunction.run = lambda *_arguments, **_named: None
    try:
        yield
    finally:
        InterpretedFunction.run = plain
