"""Runs the work of block steps in slices: see services.runtime.slices."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")

# Slices of a block step without a timed pause: the block step of a long prompt has a few.
_FAST_SLICES = 4
_PAUSE_SECONDS = 0.001


async def run_step_in_slices(work: Generator[None, None, _Result]) -> _Result:
    """Run the work of a block step and return its result: its first slices without timed pauses."""
    slices = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        slices += 1
        await asyncio.sleep(0 if slices <= _FAST_SLICES else _PAUSE_SECONDS)
