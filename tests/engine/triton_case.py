"""Triton kernels in tests: on a GPU, else under Triton's interpreter."""

import inspect
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from engine.gpu.triton_backend import TritonBackend

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _cache_builtins() -> None:
    """Cache the builtins of Triton's language that the interpreter replaces.

    It searches the whole language whenever a kernel calls a function, which is a third of its time.
    """
    from triton.runtime import interpreter

    @cache
    def builtins_of(language: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(language) if tl.core.is_builtin(member)]

    def patch_builtins(language: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins_of(language):
            if getattr(language, name) is member:  # else it is replaced
                interpreter._patch_attr(language, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtins


if DEVICE.type == "cpu":
    try:
        import triton.language as tl
    except ImportError:  # tests that need it are skipped
        pass
    else:
        _cache_builtins()


def make_triton_backend() -> "partial[TritonBackend]":
    """Return a factory of Triton backends, or skip the test without Triton."""
    pytest.importorskip("triton")
    from engine.gpu.triton_backend import TritonBackend

    return partial(TritonBackend, device=DEVICE)
