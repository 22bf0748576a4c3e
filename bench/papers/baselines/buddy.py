"""Buddy allocation (Knuth, The Art of Computer Programming, volume 1, section 2.5)."""

from bench.papers.baselines.slabs import Slab


class BuddyAllocator:
    """Hands out slabs whose sizes are powers of two.

    A memory whose size is no power of two begins as the largest powers of two that add up to it. A slab is split into
    two buddies, which merge when both are free; so slabs larger than these parts never exist.
    """

    def __init__(self, blocks: int) -> None:
        """Start with `blocks` free blocks."""
        self.free_blocks = blocks
        self._free: dict[int, set[int]] = {}  # starts of free slabs, by size
        self._part_of: dict[int, int] = {}  # the size of the part that begins at a block
        start = 0
        for bit in reversed(range(blocks.bit_length())):
            if blocks >> bit & 1:
                self._free.setdefault(1 << bit, set()).add(start)
                self._part_of[start] = 1 << bit
                start += 1 << bit

    def allocate(self, blocks: int) -> Slab | None:
        """Return a slab of at least `blocks` blocks, None if there is none. The lowest of the smallest is split."""
        size = 1 << max(blocks - 1, 0).bit_length()
        fitting = min((one for one, starts in self._free.items() if one >= size and starts), default=None)
        if fitting is None:
            return None
        start = min(self._free[fitting])
        self._free[fitting].remove(start)
        while fitting > size:
            fitting //= 2
            self._free.setdefault(fitting, set()).add(start + fitting)
        self.free_blocks -= size
        return Slab(start, size)

    def release(self, slab: Slab) -> None:
        """Free a slab, and merge it with its buddies as far as they are free."""
        self.free_blocks += slab.blocks
        start, size = slab
        while (buddy := self._buddy(start, size)) is not None and buddy in self._free.get(size, ()):
            self._free[size].remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._free.setdefault(size, set()).add(start)

    def check(self) -> None:
        """Raise AssertionError unless the free slabs are disjoint, and unmerged only where a buddy is in use."""
        covered: set[int] = set()
        for size, starts in self._free.items():
            for start in starts:
                blocks = set(range(start, start + size))
                assert not covered & blocks, f"block {min(covered & blocks)} is in two free slabs"
                covered |= blocks
                buddy = self._buddy(start, size)
                assert buddy not in starts, f"buddies {start} and {buddy} of {size} blocks are both free"
        assert len(covered) == self.free_blocks, f"{len(covered)} blocks are free, but {self.free_blocks} are counted"

    def _buddy(self, start: int, size: int) -> int | None:
        """Return the start of a slab's buddy, None if the slab is a whole part."""
        part = max(one for one in self._part_of if one <= start)
        if size >= self._part_of[part]:
            return None
        return part + ((start - part) ^ size)
