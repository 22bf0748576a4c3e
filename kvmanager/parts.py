"""Verbs that touch very many blocks are done in parts, so that others get their answers in between.

Such a verb returns an iterator instead of None: what is left of it, which pauses after each part with the units of
work that it took, see `Pool.applying`. It refuses, if at all, before it has changed anything. At every pause the
conservation law holds, counting what `PoolState` says is under way.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

# Blocks that a verb touches without a pause: below a millisecond, whatever the verb.
PART = 512

Parts = Iterator[int]

_Entry = TypeVar("_Entry")
_Result = TypeVar("_Result")


def pop_parts(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Take all entries out, a part at a time: to take one from the front would move all the others each time."""
    while entries:
        part = entries[-PART:]
        del entries[-PART:]
        yield part


def parts_of(entries: Iterable[_Entry], size: int = 0) -> Iterator[list[_Entry]]:
    """Yield the entries in parts of `size`, PART where that is 0; the last one may be shorter."""
    iterator = iter(entries)
    while part := list(islice(iterator, size or PART)):
        yield part


def complete(work: Generator[object, None, _Result]) -> _Result:
    """Do work that pauses at one go; return what it comes to."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
