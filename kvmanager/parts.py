"""Verbs that touch very many blocks are done in parts, so that others get their answers in between.

Such a verb returns an iterator instead of None: what is left of it, which pauses after each part with the units of
work that it took, see `Pool.applying`. It refuses, if at all, before it has changed anything. At every pause the
conservation law holds, counting what `PoolState` says is under way.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

# Blocks that a verb touches without a pause: below a millisecond, whatever the verb.
PART = 512
# A verb that touches no more is done at once where that is cheaper: at most two milliseconds.
LONG = 2048

Rest = Iterator[int]

_Entry = TypeVar("_Entry")


def parts_of(entries: Iterable[_Entry], size: int = 0) -> Iterator[list[_Entry]]:
    """Yield the entries in parts of `size`, PART where that is 0; the last one may be shorter."""
    iterator = iter(entries)
    while part := list(islice(iterator, size or PART)):
        yield part
