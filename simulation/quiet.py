"""Keeps what ends with a simulation from disturbing it, or its reader."""

import gc
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Let no garbage collection end a coroutine while a loop runs, and print nothing about those that ended."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
    finally:
        sys.unraisablehook = hook
        if collects:
            gc.enable()
