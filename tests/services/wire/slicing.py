"""What is done in slices, done at once."""

from collections.abc import Generator
from typing import Any


def drain(work: Generator[Any, None, Any]) -> Any:
    """Go on to the end; return what it comes to."""
    return sliced(work)[0]


def sliced(work: Generator[Any, None, Any]) -> tuple[Any, int]:
    """Go on to the end; return what it comes to, and the pauses before."""
    pauses = 0
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value, pauses
        pauses += 1
