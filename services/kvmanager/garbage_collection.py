"""Keeps Python's garbage collector from walking through all tables again and again.

A full collection looks at every entry of every table: at a million held blocks that holds everybody up for ten
milliseconds and more. So what survives the collection of the two young generations, some thousands of objects, is set
aside at once, and there is nothing left for a full one. It is given back like everything else when its last reference
goes. Only cycles stay: all is looked through when the last engine has left, and once an hour.
"""

import asyncio
import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvmanager import KVManager

_Result = TypeVar("_Result")

_PERIOD_SECONDS = 1.0
# Some calls leave cycles behind: about one object for four calls.
_LOOK_THROUGH_SECONDS = 3600.0


@contextmanager
def freeze_survivors() -> Iterator[None]:
    """Let collections inside the context pass over whatever has survived one that was not the youngest's alone."""
    gc.callbacks.append(_set_aside)
    try:
        yield
    finally:
        gc.callbacks.remove(_set_aside)


def freezing(work: Generator[None, None, _Result]) -> Generator[None, None, _Result]:
    """Do work whose results stay, and whose lists have a million entries: set them aside before they are collected."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        gc.freeze()
        yield


def _set_aside(phase: str, facts: dict[str, int]) -> None:
    if phase == "stop" and facts["generation"] > 0:
        gc.freeze()


async def run_collections(
    manager: KVManager, clock: Callable[[], float], period_seconds: float = _PERIOD_SECONDS
) -> None:
    """Set survivors aside, and look through all of them at times, until cancelled. `clock` is in seconds."""
    looked_through_at, any_since = clock(), False
    with freeze_survivors():
        while True:
            attached = bool(manager.sessions())
            if (any_since and not attached) or clock() - looked_through_at >= _LOOK_THROUGH_SECONDS:
                collect_all()
                looked_through_at = clock()
            any_since = attached
            await asyncio.sleep(period_seconds)


def collect_all() -> None:
    """Collect everything that nothing refers to but itself."""
    gc.unfreeze()
    gc.collect()
