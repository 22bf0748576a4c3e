"""The cached blocks: reference count 0 and a key, least recently released first."""

from collections.abc import Iterator, Sequence
from itertools import islice


class CachedQueue:
    """A doubly linked queue of block ids from which any block can be removed in constant time.

    The links form a ring through entry 0. A block is in the queue if its predecessor links to it; stale links of
    removed blocks never do. `size` counts the blocks.
    """

    def __init__(self) -> None:
        self.size = 0
        self._next = [0]
        self._previous = [0]

    def __contains__(self, block: int) -> bool:
        return self._next[self._previous[block]] == block

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks in order. The queue must not change during the iteration."""
        block = self._next[0]
        while block:
            yield block
            block = self._next[block]

    @property
    def first(self) -> int:
        """The block that is evicted next; 0 if the queue is empty."""
        return self._next[0]

    def grow(self, count: int) -> None:
        """Add links for `count` more block ids."""
        self._next += [0] * count
        self._previous += [0] * count

    def extend(self, blocks: Sequence[int]) -> None:
        """Append blocks."""
        following, preceding = self._next, self._previous
        last = preceding[0]
        for block in blocks:
            following[last] = block
            preceding[block] = last
            last = block
        following[last] = 0
        preceding[0] = last
        self.size += len(blocks)

    def remove(self, block: int) -> None:
        """Remove a block. Raises KeyError if it is not in the queue."""
        following, preceding = self._next, self._previous
        before, after = preceding[block], following[block]
        if following[before] != block or not block:
            raise KeyError(block)
        following[before], preceding[after] = after, before
        self.size -= 1

    def clearing(self, entries: int) -> Iterator[None]:
        """Free the memory of the links, pausing after each `entries` entries."""
        self.size = 0
        for links in (self._next, self._previous):
            while links:
                del links[-entries:]
                yield

    def is_linked(self, block: int) -> bool:
        """Return whether the successor of a queued block links back to it."""
        return self._previous[self._next[block]] == block

    def violations(self) -> list[str]:
        """Compare `size` with the number of linked blocks."""
        linked = len(list(islice(self, len(self._next))))
        return [f"the cached queue counts {self.size} blocks, but links {linked}"] if linked != self.size else []
