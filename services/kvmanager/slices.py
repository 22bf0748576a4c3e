"""Long work on the event loop, a slice at a time: between slices, others get their answers."""

import asyncio
from collections.abc import Generator
from typing import TypeVar

_Result = TypeVar("_Result")

# Of a Step, between which others only take their turn: a long prompt's Step has some.
_HASTY_SLICES = 4
_POLITE_SECONDS = 0.001


async def run_in_slices(work: Generator[None, None, _Result], together: int = 1, pause_seconds: float = 0) -> _Result:
    """Do some work, so many slices between two pauses, and return what it gives.

    A pause of 0 lets those go on who can go on now. An engine's call goes through the event loop several times, and
    would meet a slice each time; a pause of a millisecond lets it come through.
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
    """Do an engine's work: at once what is one slice, with others between what is some, politely what is many."""
    slices = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
        slices += 1
        await asyncio.sleep(0 if slices <= _HASTY_SLICES else _POLITE_SECONDS)
