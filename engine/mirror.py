"""The engine's own view of its pool: which blocks its sequences hold, and how many could be handed out."""

from collections import Counter

from engine.blocks import TableChange
from engine.request import Sequence


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

    def cost(self, sequence: Sequence, room: int) -> int:
        """Return how many more blocks the sequence needs to have room for `room` tokens."""
        return max(0, self.blocks_for(room) - len(sequence.table))

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
