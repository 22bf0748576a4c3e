"""What is read in slices, read at once."""

from collections.abc import Generator
from typing import Any


def drain(work: Generator[Any, None, Any]) -> Any:
    """Go on to the end; return what it comes to."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value
