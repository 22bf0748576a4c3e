"""The engine's own view of its pool: which blocks its sequences hold, and how many could be handed out."""

from collections import Counter
from collections.abc import Iterable

from engine.blocks import TableChange
from engine.group import Sequence


class Mirror:
    """Kept from the answers that were applied; exact whenever no Step is under way.

    While a Step is being made, `available` runs ahead: what the Step frees is added, what it asks for is taken off.
    """

    def __init__(self, block_size: int, device_blocks: int) -> None:
        self.block_size = block_size
        self.device_blocks = device_blocks
        self.available = device_blocks
        self._holders: Counter[int] = Counter()

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-tokens // self.block_size)

    def cost(self, rooms: Iterable[tuple[Sequence, int]]) -> int:
        """Return how many blocks it takes to give sequences room for so many tokens each, copies of shared ones too."""
        blocks, moved = 0, Counter[int]()
        for sequence, room in rooms:
            needed = self.blocks_for(room)
            blocks += max(0, needed - len(sequence.table))
            for block in sequence.table[sequence.room // self.block_size : needed]:
                if self._holders[block] - moved[block] > 1:  # who moves to a copy does not share it any more
                    moved[block] += 1
                    blocks += 1
        return blocks

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """Let a new sequence share the parent's blocks below `length`, as the block manager does when it is told."""
        keep = self.blocks_for(length)
        self._holders.subtract(parent.table[keep:])
        del parent.table[keep:]
        child.table = list(parent.table)
        self._holders.update(child.table)
        parent.room = child.room = length

    def change_table(self, sequence: Sequence, change: TableChange) -> None:
        """Give the sequence's table its new end."""
        self._holders.subtract(sequence.table[change.first_index :])
        sequence.table[change.first_index :] = change.block_ids
        self._holders.update(change.block_ids)
        sequence.room = change.room_tokens

    def release(self, sequence: Sequence) -> None:
        """Count what freeing the sequence's table brings: the blocks that nobody else holds."""
        self._holders.subtract(sequence.table)
        self.available += sum(self._holders[block] == 0 for block in sequence.table)

    def clear(self) -> None:
        """The pool is new: nothing is held."""
        self.available = self.device_blocks
        self._holders.clear()
