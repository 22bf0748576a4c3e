"""The free list: blocks with reference count 0 and without a key, in the order in which they are handed out."""

from array import array
from collections.abc import Iterable

# Handed-out entries that may remain before the head of the array. Beyond this, they are removed once they outnumber
# the free ones.
_MAX_STALE = 4000
# Free blocks that are searched at a time.
_SEARCHED = 65_536


class FreeList:
    """A FIFO queue of free blocks.

    It is an array of numbers because the objects of a deque scatter over memory, so that each grant misses the cache.
    Entries before `head` have been handed out. Those of `discarded` blocks, which never return, are skipped when they
    are reached, because searching for them takes time by the length of the list.
    """

    def __init__(self) -> None:
        self.blocks = array("i")
        self.head = 0
        self.discarded: set[int] = set()

    def __len__(self) -> int:
        return len(self.blocks) - self.head - len(self.discarded)

    def take(self) -> int:
        """Take the next block; 0 if the list is empty."""
        while self.head < len(self.blocks):
            block = self.blocks[self.head]
            self.head += 1
            if block not in self.discarded:
                return block
            self.discarded.remove(block)
        return 0

    def take_many(self, count: int) -> list[int]:
        """Take the next `count` blocks. The caller has checked that there are enough."""
        if self.discarded:
            return [self.take() for _ in range(count)]
        blocks = self.blocks[self.head : self.head + count].tolist()
        self.head += count
        return blocks

    def extend(self, blocks: Iterable[int]) -> None:
        """Append blocks."""
        self.blocks.extend(blocks)
        if self.head > _MAX_STALE and 2 * self.head > len(self.blocks):
            del self.blocks[: self.head]
            self.head = 0

    def in_order(self) -> "array[int]":
        """Return a copy of the free blocks in order."""
        if not self.discarded:
            return self.blocks[self.head :]
        return array("i", [block for block in self.blocks[self.head :] if block not in self.discarded])

    def discard(self, block: int) -> None:
        """Remove a block that is in the list once and never returns to it."""
        self.discarded.add(block)

    def remove(self, block: int) -> None:
        """Remove every occurrence of a block. Takes time by the length of the list."""
        self.discarded.discard(block)
        blocks, wanted = self.blocks, array("i", (block,)).tobytes()
        width, start = blocks.itemsize, self.head
        while start < len(blocks):
            part = blocks[start : start + _SEARCHED].tobytes()
            at = part.find(wanted)
            while at % width and at >= 0:
                at = part.find(wanted, at + 1)
            if at >= 0:
                start += at // width
                del blocks[start]
            else:
                start += _SEARCHED

    def clear(self) -> None:
        """Empty the list and free its memory."""
        self.blocks = array("i")
        self.head = 0
        self.discarded.clear()
