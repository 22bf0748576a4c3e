"""The cached blocks: at count 0 with a key, least recently released first."""

from collections.abc import Iterator, Sequence
from itertools import islice


class CachedQueue:
    """A queue that a block can leave from the middle: a ring of links through entry 0.

    A block is in it if the one before it is followed by it. The links that a block leaves behind never say so.
    `number` counts the blocks.
    """

    def __init__(self) -> None:
        self.number = 0
        self._following = [0]
        self._preceding = [0]

    def __contains__(self, block: int) -> bool:
        return self._following[self._preceding[block]] == block

    def __iter__(self) -> Iterator[int]:
        """Yield the blocks in their order. The queue must not change meanwhile."""
        block = self._following[0]
        while block:
            yield block
            block = self._following[block]

    @property
    def first(self) -> int:
        """The block that is evicted next; 0 if there is none."""
        return self._following[0]

    def grow(self, number: int) -> None:
        """Make room for the links of so many more blocks."""
        self._following += [0] * number
        self._preceding += [0] * number

    def extend(self, blocks: Sequence[int]) -> None:
        """Add blocks at the end."""
        following, preceding = self._following, self._preceding
        last = preceding[0]
        for block in blocks:
            following[last] = block
            preceding[block] = last
            last = block
        following[last] = 0
        preceding[0] = last
        self.number += len(blocks)

    def leave(self, block: int) -> None:
        """Remove a block. Raises KeyError where it is not in the queue."""
        following, preceding = self._following, self._preceding
        before, after = preceding[block], following[block]
        if following[before] != block or not block:
            raise KeyError(block)
        following[before], preceding[after] = after, before
        self.number -= 1

    def clearing(self, entries: int) -> Iterator[None]:
        """Give the memory of the links back, pausing after so many entries."""
        self.number = 0
        for links in (self._following, self._preceding):
            while links:
                del links[-entries:]
                yield

    def is_linked(self, block: int) -> bool:
        """Return whether the links after a block of the queue lead back to it."""
        return self._preceding[self._following[block]] == block

    def violations(self) -> list[str]:
        """Compare the number of blocks with the links."""
        counted = len(list(islice(self, len(self._following))))
        return [f"{self.number} blocks are cached, counting says otherwise"] if counted != self.number else []
