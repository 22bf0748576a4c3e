"""Long work on the event loop, a slice at a time: between slices, others get their answers."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")


async def in_slices(work: Generator[None, None, _Result], together: int = 1) -> _Result:
    """Do some work, so many slices between two pauses, and return what it gives."""
    while True:
        try:
            for _ in range(together):
                next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        await asyncio.sleep(0)
