"""Marks on the few blocks of a tier that are not indexed or not in circulation."""

UNINDEXED = 1  # held, and not found by its present or future key: keyed before a reset, faulty, or a copy of such
WITHHOLD_ON_RELEASE = 2  # held and unindexed; withheld once its last holder releases it
WITHHELD = 4


class BlockMarks:
    """The mark of each block; 0 for nearly all of them."""

    def __init__(self, total: int) -> None:
        self.by_block = bytearray(total + 1)
        self.marked_count = 0
        self.withheld_count = 0

    def set(self, block: int, mark: int) -> None:
        """Replace the mark of a block; 0 removes it."""
        before = self.by_block[block]
        self.marked_count += bool(mark) - bool(before)
        self.withheld_count += (mark == WITHHELD) - (before == WITHHELD)
        self.by_block[block] = mark

    def is_indexable(self, block: int) -> bool:
        """Return whether the index may map a key to the block. If not, it must not map one to a copy either."""
        return not self.by_block[block]

    def unindex(self, block: int) -> None:
        """Keep a held block, which is not in the index, out of it for as long as it is held."""
        if not self.by_block[block]:
            self.set(block, UNINDEXED)

    def is_withheld_or_marked(self, block: int) -> bool:
        """Return whether the block is withheld, or will be on its release."""
        return self.by_block[block] > UNINDEXED

    def unindexed(self) -> list[int]:
        """Return the held blocks that are kept out of the index."""
        return self._with(UNINDEXED)

    def withheld(self) -> list[int]:
        """Return the blocks that are out of circulation."""
        return self._with(WITHHELD)

    def withheld_on_release(self) -> list[int]:
        """Return the held blocks that are withheld once their last holders release them."""
        return self._with(WITHHOLD_ON_RELEASE)

    def _with(self, mark: int) -> list[int]:
        return [block for block, marks in enumerate(self.by_block) if marks & mark] if self.marked_count else []

    def violations(self) -> list[str]:
        """Compare the counts with the marks."""
        if self.marked_count != sum(map(bool, self.by_block)) or self.withheld_count != len(self.withheld()):
            return ["the counts of unindexed and withheld blocks are wrong"]
        return []
