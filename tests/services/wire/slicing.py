"""Runs sliced work to its end."""

from collections.abc import Generator
from typing import Any


def drain(work: Generator[Any, None, Any]) -> Any:
    return sliced(work)[0]


def sliced(work: Generator[Any, None, Any]) -> tuple[Any, int]:
    """Return the result of the work, and the number of pauses."""
    pauses = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1
