"""The free list: blocks at count 0 without a key, in the order in which they will be handed out."""

from array import array
from collections.abc import Iterable

# Blocks that were handed out and are still in the array of free ones, at most, while there are more of the others.
_LONGEST_GONE = 4000
# Free blocks that are searched in one go.
_SEARCHED = 65_536


class FreeList:
    """A queue of blocks.

    Numbers in an array, not objects in a deque: after a long life those lie scattered over the memory, and each grant
    would wait for it. What is before the head has been handed out.
    """

    def __init__(self) -> None:
        self.blocks = array("i")
        self.head = 0

    def __len__(self) -> int:
        return len(self.blocks) - self.head

    def take(self) -> int:
        """Take the next block; 0 if there is none."""
        if self.head == len(self.blocks):
            return 0
        block = self.blocks[self.head]
        self.head += 1
        return block

    def take_many(self, number: int) -> list[int]:
        """Take the next `number` blocks. The caller has checked that there are enough."""
        blocks = self.blocks[self.head : self.head + number].tolist()
        self.head += number
        return blocks

    def extend(self, blocks: Iterable[int]) -> None:
        """Add blocks at the end."""
        self.blocks.extend(blocks)
        if self.head > _LONGEST_GONE and 2 * self.head > len(self.blocks):
            del self.blocks[: self.head]
            self.head = 0

    def in_order(self) -> "array[int]":
        """Return a copy of the queue."""
        return self.blocks[self.head :]

    def remove(self, block: int) -> None:
        """Remove a block, however often it is in the queue. Searches the whole queue."""
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
        """Empty the queue and give its memory back."""
        self.blocks = array("i")
        self.head = 0
