"""The engine's own view of its pool: which blocks its sequences hold, and how many could be handed out."""

from collections import Counter
from collections.abc import Collection, Iterable

from blocks import TableChange, blocks_for
from engine.schedule.sequence_group import Sequence


class PoolView:
    """Kept from the answers that were applied; exact whenever no Step is under way.

    While a Step is being made, `available` runs ahead: what the Step frees is added, what it asks for is taken off.
    """

    def __init__(self, block_size: int, device_blocks: int) -> None:
        self.block_size = block_size
        self.available = device_blocks
        self.available_host = 0
        self._holders: Counter[int] = Counter()
        self._host_holders: Counter[int] = Counter()
        # Host blocks of the same contents as device blocks, and how often they had been given up by then: an entry
        # holds until the device block is granted anew, or the host block given up.
        self._twins: dict[int, tuple[int, int]] = {}
        self._given_up: Counter[int] = Counter()

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return blocks_for(tokens, self.block_size)

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
        self.available += sum(self._holders[block] == 0 for block in parent.table[keep:])
        del parent.table[keep:]
        child.table = list(parent.table)
        self._holders.update(child.table)
        parent.room = child.room = length

    def change_table(self, sequence: Sequence, change: TableChange) -> None:
        """Give the sequence's table its new end."""
        self._holders.subtract(sequence.table[change.first_index :])
        sequence.table[change.first_index :] = change.block_ids
        for block in change.block_ids:
            if not self._holders[block]:
                self._twins.pop(block, None)
        self._holders.update(change.block_ids)
        sequence.room = change.room_tokens

    def release(self, sequence: Sequence) -> None:
        """Count what giving the sequence's device blocks up brings: those that nobody else holds."""
        self._holders.subtract(sequence.table)
        self.available += sum(self._holders[block] == 0 for block in sequence.table)

    def retake(self, sequence: Sequence) -> None:
        """The sequence has its device blocks still: they were not given up."""
        self._holders.update(sequence.table)

    def pin(self, blocks: Iterable[int]) -> None:
        """Count a pin as a holder of blocks that a sequence holds."""
        self._holders.update(blocks)

    def unpin(self, blocks: Collection[int]) -> None:
        """Count what removing a pin brings: the blocks that nobody else holds."""
        self.drop_pin(blocks)
        self.available += sum(self._holders[block] == 0 for block in blocks)

    def drop_pin(self, blocks: Iterable[int]) -> None:
        """Forget a pin that was not made."""
        self._holders.subtract(blocks)

    def forget_twins(self) -> None:
        """The block manager forgot which host blocks have the contents of which device blocks."""
        self._twins.clear()

    def move_out(self, sequence: Sequence, change: TableChange) -> None:
        """Give the sequence its table of host blocks; what it had on the device was given up when that was asked."""
        for block, moved in zip(sequence.table, change.block_ids, strict=True):
            self._twins[block] = (moved, self._given_up[moved])
        self._host_holders.update(change.block_ids)
        sequence.table, sequence.swapped = list(change.block_ids), True

    def move_in(self, sequence: Sequence, change: TableChange) -> None:
        """Give the sequence its table of device blocks."""
        self.release_host(sequence)
        sequence.table, sequence.swapped = [], False
        self.change_table(sequence, change)

    def release_host(self, sequence: Sequence) -> None:
        """Forget that the sequence holds host blocks."""
        self._host_holders.subtract(sequence.table)
        self._given_up.update(block for block in sequence.table if not self._host_holders[block])

    def host_cost(self, blocks: Iterable[int]) -> int:
        """Return how many host blocks device blocks take at most: some of those that are shared are there already."""
        return sum(not self._is_on_host(block) for block in blocks)

    def _is_on_host(self, block: int) -> bool:
        moved, given_up = self._twins.get(block, (0, 0))
        return self._host_holders[moved] > 0 and self._given_up[moved] == given_up
