"""Runs long work on the event loop in slices, so that other calls are answered in between."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")

# Slices of a Step without a timed pause: the Step of a long prompt has a few.
_FAST_SLICES = 4
_PAUSE_SECONDS = 0.001


async def run_in_slices(work: Generator[None, None, _Result], together: int = 1, pause_seconds: float = 0) -> _Result:
    """Run work with `together` slices between two pauses, and return its result.

    A pause of 0 seconds runs the callbacks that are ready. An engine's call needs several turns of the event loop and
    would wait for a slice at each; a pause of a millisecond is enough for the whole call.
    """
    while True:
        try:
            for _ in range(together):
                next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        await asyncio.sleep(pause_seconds)


async def run_step_in_slices(work: Generator[None, None, _Result]) -> _Result:
    """Run the work of a Step and return its result: without timed pauses for its first slices, with them for more."""
    slices = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        slices += 1
        await asyncio.sleep(0 if slices <= _FAST_SLICES else _PAUSE_SECONDS)
