"""Marks: the few blocks of a tier that are in no index, or out of circulation."""

UNINDEXED = 1  # held, and no key leads to it, though it has one or will have: keyed before a reset, blamed, or a copy
WITHHOLD_ON_RELEASE = 2  # held, unindexed, and withheld once its last holder releases it
WITHHELD = 4


class BlockMarks:
    """What is unusual about each block: 0 for nearly all of them."""

    def __init__(self, total: int) -> None:
        self.of = bytearray(total + 1)  # by block
        self.number = 0  # blocks with a mark
        self.withheld_number = 0

    def set(self, block: int, mark: int) -> None:
        """Replace the mark of a block; 0 for none."""
        before = self.of[block]
        self.number += bool(mark) - bool(before)
        self.withheld_number += (mark == WITHHELD) - (before == WITHHELD)
        self.of[block] = mark

    def is_indexable(self, block: int) -> bool:
        """Return whether a key may lead to the block. If not, none may lead to a copy of it either."""
        return not self.of[block]

    def unindex(self, block: int) -> None:
        """Let no key lead to a held block that is not in the index, now or later."""
        if not self.of[block]:
            self.set(block, UNINDEXED)

    def is_out(self, block: int) -> bool:
        """Return whether the block is withheld, or will be."""
        return self.of[block] > UNINDEXED

    def unindexed(self) -> list[int]:
        """Return the held blocks that no key leads to."""
        return self._with(UNINDEXED)

    def withheld(self) -> list[int]:
        """Return the blocks that were taken out of circulation."""
        return self._with(WITHHELD)

    def withheld_on_release(self) -> list[int]:
        """Return the held blocks that are taken out of circulation once their last holders release them."""
        return self._with(WITHHOLD_ON_RELEASE)

    def _with(self, mark: int) -> list[int]:
        return [block for block, marks in enumerate(self.of) if marks & mark] if self.number else []

    def violations(self) -> list[str]:
        """Compare the numbers with the marks."""
        if self.number != sum(map(bool, self.of)) or self.withheld_number != len(self.withheld()):
            return ["the numbers of unfindable and withheld blocks are wrong"]
        return []
