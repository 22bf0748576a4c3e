"""Runs long work on the event loop in slices, so that other calls are answered in between."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")


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
