"""Keeps Python's garbage collector from traversing all tables repeatedly.

A full collection traverses every entry of every table, which blocks the event loop for more than ten milliseconds at a
million held blocks. Objects that survive a collection of the young generations are therefore frozen at once, so that
full collections have nothing to traverse. Frozen objects are still freed by reference counting; only cycles remain.
They are collected when the last engine has detached, and after an hour in the next second without a block step: the
collection traverses everything, which takes some 40 ms at a million held blocks, and cannot be divided. After a day it
no longer waits for such a second.
"""

import asyncio
import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvmanager import KVManager

_Result = TypeVar("_Result")

_PERIOD_SECONDS = 1.0
# Some calls leave cycles: about one object for four calls.
_FULL_COLLECTION_SECONDS = 3600.0
_LONGEST_SECONDS = 24 * _FULL_COLLECTION_SECONDS


@contextmanager
def freeze_survivors() -> Iterator[None]:
    """Freeze, inside the context, the survivors of every collection except those of the youngest generation."""
    gc.callbacks.append(_freeze_on_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(_freeze_on_collection)


def freezing(work: Generator[None, None, _Result]) -> Generator[None, None, _Result]:
    """Run work whose results are long-lived and large, freezing them after each slice, before they are traversed."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        gc.freeze()
        yield


def _freeze_on_collection(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] > 0:
        gc.freeze()


async def run_collections(
    manager: KVManager, clock: Callable[[], float], period_seconds: float = _PERIOD_SECONDS
) -> None:
    """Freeze survivors and run full collections until cancelled. `clock` is in seconds."""
    last_full_collection, was_attached, steps = clock(), False, 0
    with freeze_survivors():
        while True:
            attached, before = bool(manager.sessions()), steps
            steps = sum(session.totals.steps for session in manager.sessions())
            age = clock() - last_full_collection
            is_due = age >= (_FULL_COLLECTION_SECONDS if steps == before else _LONGEST_SECONDS)
            if (was_attached and not attached) or is_due:
                collect_all()
                last_full_collection = clock()
            was_attached = attached
            await asyncio.sleep(period_seconds)


def collect_all() -> None:
    """Collect all unreachable cycles, including frozen objects."""
    gc.unfreeze()
    gc.collect()
