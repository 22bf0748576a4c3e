"""Verbs on many blocks run in parts, so that other calls are answered in between.

Such a verb returns `Parts` instead of None: an iterator that yields the units of work after each part, see
`Pool.applying`. A verb is refused, if at all, before it changes anything. At every pause the conservation law holds,
counting the blocks in flight of `PoolState`.

Functions whose names end in -ing (`applying`, `granting`, `releasing`) are such iterators or generators.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

# Blocks that a verb processes without a pause: below a millisecond for every verb.
PART = 512

Parts = Iterator[int]

_Entry = TypeVar("_Entry")
_Result = TypeVar("_Result")


def pop_parts(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Empty a list, a part at a time, from the end because removing from the front moves all other entries."""
    while entries:
        part = entries[-PART:]
        del entries[-PART:]
        yield part


def parts_of(entries: Iterable[_Entry], size: int = 0) -> Iterator[list[_Entry]]:
    """Yield the entries in parts of `size`, or of PART if `size` is 0; the last one may be shorter."""
    iterator = iter(entries)
    while part := list(islice(iterator, size or PART)):
        yield part


def complete(work: Generator[object, None, _Result]) -> _Result:
    """Run a generator to its end without pauses; return its return value."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: _Result = end.value
            return result
