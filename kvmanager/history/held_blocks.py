"""The device blocks that a request holds according to its events."""

from collections import Counter
from collections.abc import Iterable


class HeldBlocks:
    """The device blocks of one kind that a request holds.

    Events record the growth of a group at one of its sequences; the table of each is known only when it is freed. If
    one of several sequences got a copy, the copied block is counted too.
    """

    def __init__(self) -> None:
        self.max_blocks = 0
        self._tables: dict[tuple[str, int], set[int]] = {}
        self._holders: Counter[tuple[str, int]] = Counter()

    @property
    def now(self) -> int:
        """Number of held blocks."""
        return len(self._holders)

    @property
    def live(self) -> bool:
        """Whether any sequence has a table, in either tier."""
        return bool(self._tables)

    def clear(self) -> None:
        """Forget all sequences."""
        self._tables.clear()
        self._holders.clear()

    def grow(self, engine_id: str, sequence: int, blocks: Iterable[int]) -> None:
        """Add blocks to a sequence, which may be new."""
        table = self._tables.setdefault((engine_id, sequence), set())
        new = set(blocks) - table
        table |= new
        self._holders.update((engine_id, block) for block in new)
        self.max_blocks = max(self.max_blocks, self.now)

    def replace(self, engine_id: str, sequence: int, blocks: Iterable[int]) -> None:
        """Set the blocks of a sequence."""
        self._drop(engine_id, sequence)
        self.grow(engine_id, sequence, blocks)

    def shrink(self, engine_id: str, sequence: int, blocks: Iterable[int]) -> None:
        """Remove blocks from a sequence, wherever their growth was recorded."""
        gone = set(blocks)
        table = self._drop(engine_id, sequence)
        self._drop_from_others(gone - table)
        self.grow(engine_id, sequence, table - gone)

    def end(self, engine_id: str, sequence: int, blocks: Iterable[int]) -> None:
        """Remove a sequence that had these blocks."""
        freed = set(blocks)
        self.max_blocks = max(self.max_blocks, len(freed))
        table = self._drop(engine_id, sequence)
        self._drop_from_others(freed - table)
        if self._tables:
            self.grow(*next(iter(self._tables)), table - freed)

    def _drop_from_others(self, blocks: set[int]) -> None:
        for other in list(self._tables) if blocks else ():
            self.replace(*other, self._tables[other] - blocks)

    def _drop(self, engine_id: str, sequence: int) -> set[int]:
        table = self._tables.pop((engine_id, sequence), set())
        for block in table:
            self._holders[engine_id, block] -= 1
            if not self._holders[engine_id, block]:
                del self._holders[engine_id, block]
        return table
