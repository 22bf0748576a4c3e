"""The engine's own view of its pool: which blocks its sequences hold, and how many could be handed out."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from blocks import TableChange
from engine.schedule.pool.prefix_claims import PrefixClaims
from engine.schedule.request import Capacity
from engine.schedule.sequence_group import Sequence


class PoolView:
    """Owns the tables and rooms of sequences, what is available, and what the pool can give one request.

    Kept from the answers that were applied; exact whenever no Step is under way. While a Step is being made,
    `available` runs ahead: what the Step frees is added, what it reserves is taken off.
    """

    def __init__(self, capacity: Capacity) -> None:
        """Begin with an empty pool."""
        self.capacity = capacity
        self.block_size = capacity.block_size
        self.claims = PrefixClaims(capacity.block_size)
        self.available = capacity.device_blocks
        self.available_host = capacity.host_blocks
        self._holders: Counter[int] = Counter()
        self._host_holders: Counter[int] = Counter()
        # Host blocks of the same contents as device blocks, and how often they had been given up by then: an entry
        # holds until the device block is granted anew, or the host block given up.
        self._host_copies: dict[int, tuple[int, int]] = {}
        self._host_generations: Counter[int] = Counter()

    # Counting.

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens fill."""
        return -(-tokens // self.block_size)  # written out: a step asks this several times for each sequence

    def cost(self, rooms: Iterable[tuple[Sequence, int]]) -> int:
        """Return the number of blocks that these rooms (in tokens) need, copies of shared blocks included."""
        blocks, moved = 0, Counter[int]()
        for sequence, room in rooms:
            needed = self.blocks_for(room)
            blocks += max(0, needed - len(sequence.table))
            for block in sequence.table[sequence.room // self.block_size : needed]:
                if self._holders[block] - moved[block] > 1:  # who moves to a copy does not share it any more
                    moved[block] += 1
                    blocks += 1
        return blocks

    def host_cost(self, blocks: Iterable[int]) -> int:
        """Return how many host blocks device blocks take at most: some of those that are shared are there already."""
        return sum(not self._is_on_host(block) for block in blocks)

    def withhold(self, blocks: int) -> None:
        """Go on without device blocks that an audit took out."""
        self.capacity = replace(self.capacity, device_blocks=self.capacity.device_blocks - blocks)

    def count_pinned(self, blocks: int) -> None:
        """Note how many device blocks no request can have: pins hold them, or will."""
        self.capacity = replace(self.capacity, pinned_blocks=blocks)

    # Tables and reservations.

    def reserve(self, blocks: int) -> bool:
        """Take blocks off what is available, if there are as many; return whether there were."""
        if blocks > self.available:
            return False
        self.available -= blocks
        return True

    def set_available(self, available: int, available_host: int) -> None:
        """Take the counts over from the block manager: reservations are granted by now, or void."""
        self.available = available
        self.available_host = available_host

    def grant(self, sequence: Sequence, change: TableChange, *, to_host: bool = False) -> None:
        """Give the sequence the table of an answer: its new end, or its blocks in the tier that it moves to."""
        if to_host:
            self._swap_out_table(sequence, change)
            return
        if sequence.swapped:
            self._release_host_blocks(sequence)
            sequence.table, sequence.swapped = [], False
        self._holders.subtract(sequence.table[change.first_index :])
        sequence.table[change.first_index :] = change.block_ids
        for block in change.block_ids:
            if not self._holders[block]:
                self._host_copies.pop(block, None)
        self._holders.update(change.block_ids)
        sequence.room = change.room_tokens

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """Let a new sequence share the parent's blocks below `length`, as the block manager does when asked."""
        keep = self.blocks_for(length)
        self._release_blocks(parent.table[keep:])
        del parent.table[keep:]
        child.table = list(parent.table)
        self._holders.update(child.table)
        parent.room = child.room = length

    def release(self, sequence: Sequence) -> None:
        """Take the sequence's blocks away from it; those that nobody else holds become available."""
        if sequence.swapped:
            self._release_host_blocks(sequence)
        else:
            self._release_blocks(sequence.table)
        sequence.table, sequence.room, sequence.swapped = [], 0, False

    # Swapping.

    def begin_swap_out(self, sequences: Collection[Sequence]) -> None:
        """Count device blocks of sequences that move to the host as available, and reserve host blocks for them."""
        self.available_host -= self.host_cost({block for sequence in sequences for block in sequence.table})
        for sequence in sequences:
            self._release_blocks(sequence.table)

    def rollback_swap_out(self, sequences: Iterable[Sequence]) -> None:
        """The sequences were not moved, and hold their device blocks still. The counts have been settled since."""
        for sequence in sequences:
            self._holders.update(sequence.table)

    def clear_host_copies(self) -> None:
        """The block manager forgot which host blocks have the contents of which device blocks."""
        self._host_copies.clear()

    def _swap_out_table(self, sequence: Sequence, change: TableChange) -> None:
        for block, moved in zip(sequence.table, change.block_ids, strict=True):
            self._host_copies[block] = (moved, self._host_generations[moved])
        self._host_holders.update(change.block_ids)
        sequence.table, sequence.swapped = list(change.block_ids), True

    def _is_on_host(self, block: int) -> bool:
        moved, given_up = self._host_copies.get(block, (0, 0))
        return self._host_holders[moved] > 0 and self._host_generations[moved] == given_up

    # Holders.

    def pin(self, blocks: Iterable[int]) -> None:
        """Count a pin as a holder of blocks that a sequence holds."""
        self._holders.update(blocks)

    def unpin(self, blocks: Collection[int]) -> None:
        """Remove a pin; blocks that nobody else holds become available."""
        self._release_blocks(blocks)

    def rollback_pin(self, blocks: Iterable[int]) -> None:
        """Forget a pin that was not made. The counts have been settled since it was asked for."""
        self._holders.subtract(blocks)

    def _release_blocks(self, blocks: Collection[int]) -> None:
        self._holders.subtract(blocks)
        self.available += sum(self._holders[block] == 0 for block in blocks)

    def _release_host_blocks(self, sequence: Sequence) -> None:
        self._host_holders.subtract(sequence.table)
        self._host_generations.update(block for block in sequence.table if not self._host_holders[block])
