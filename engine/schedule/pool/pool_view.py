"""The engine's view of its pool: the blocks of its sequences and the count of available blocks."""

from collections import Counter
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items
from dataclasses import replace

from blocks import TableChange
from engine.schedule.capacity import Capacity
from engine.schedule.pool.prefix_claims import PrefixClaims
from engine.schedule.pool.window_view import WindowView
from engine.schedule.sequence_group import Sequence


class PoolView:
    """Owns the tables and room of sequences, the available blocks, and the capacity for one request.

    Updated by results, and exact while no block step is in flight. While a block step is being built, `available`
    anticipates it: frees are added and reservations subtracted. It is that of kind 0; `windows` have the other kinds of
    blocks.
    """

    def __init__(self, capacity: Capacity) -> None:
        """Start with an empty pool."""
        self.capacity = capacity
        self.whole = capacity  # with the withheld blocks
        self._withheld: list[set[int]] = [set() for _ in (0, *capacity.windows)]
        self.block_size = capacity.block_size
        self.claims = PrefixClaims(capacity.block_size, caching=capacity.caches_prefixes)
        self.available = capacity.device_blocks
        self.available_host = capacity.host_blocks
        self.windows = [WindowView(index, kind, capacity.block_size) for index, kind in enumerate(capacity.windows)]
        self._holders: Counter[int] = Counter()
        self._host_holders: Counter[int] = Counter()
        # Host copies of device blocks, each with the generation of the host block. An entry is valid until the device
        # block is granted again, or the host block is released, which increments its generation.
        self._host_copies: dict[int, tuple[int, int]] = {}
        self._host_generations: Counter[int] = Counter()

    # Counting.

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens fill."""
        return -(-tokens // self.block_size)  # inlined, because a step computes it several times for each sequence

    def cost(self, rooms: Iterable[tuple[Sequence, int]]) -> int:
        """Return the number of blocks that this room (in tokens) needs, including copies of shared blocks."""
        blocks, moved = 0, Counter[int]()
        for sequence, room in rooms:
            needed = self.blocks_for(room)
            blocks += max(0, needed - len(sequence.table))
            for block in sequence.table[sequence.room // self.block_size : needed]:
                if self._holders[block] - moved[block] > 1:  # a sequence that gets a copy no longer shares the block
                    moved[block] += 1
                    blocks += 1
        return blocks

    @property
    def least_available(self) -> int:
        """Number of available blocks of the kind that has the fewest."""
        return min(self.available, *[window.available for window in self.windows]) if self.windows else self.available

    def shared_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Return how many blocks of these sequences others hold, too."""
        own = Counter(block for sequence in sequences for block in sequence.table)
        return sum(self._holders[block] > count for block, count in own.items())

    def is_held(self, block: int) -> bool:
        """Return whether a sequence or a pin holds a device block."""
        return self._holders[block] > 0

    def host_cost(self, blocks: Iterable[int]) -> int:
        """Return the most host blocks that these device blocks need; some have a copy on the host already."""
        copies = [self._host_copies.get(block, (0, 0)) for block in blocks]
        return sum(not (self._host_holders[host] > 0 and self._host_generations[host] == age) for host, age in copies)

    def withhold(self, blocks: Items[Collection[int]]) -> None:
        """Remove device blocks of each kind from the capacity and from the prefix cache. Each block counts once."""
        for before, own in zip(self._withheld, blocks, strict=False):
            before.update(own)
        kinds = zip(self.whole.windows, self._withheld[1:], strict=True)
        windows = tuple([replace(kind, device_blocks=kind.device_blocks - len(own)) for kind, own in kinds])
        left = self.whole.device_blocks - len(self._withheld[0])
        self.capacity = replace(self.capacity, device_blocks=left, windows=windows)
        for block in blocks[0]:
            self.claims.cached.forget_block(block)

    def count_pinned(self, blocks: int, in_windows: Iterable[int]) -> None:
        """Set the numbers of device blocks that pins hold or will hold: of kind 0, and of each window kind."""
        self.capacity = replace(self.capacity, pinned_blocks=blocks, pinned_in_windows=tuple(in_windows))

    # Tables and reservations.

    def has(self, blocks: int, in_windows: Iterable[int] = ()) -> bool:
        """Return whether blocks, and these of each window kind, are available."""
        if not self.windows or blocks > self.available:
            return blocks <= self.available
        return all(count <= window.available for window, count in zip(self.windows, in_windows, strict=False))

    def reserve(self, blocks: int, in_windows: Collection[int] = ()) -> bool:
        """Subtract blocks from the available ones, and these of each window kind.

        Returns False and changes nothing if there are too few.
        """
        if not self.has(blocks, in_windows):
            return False
        self.available -= blocks
        if self.windows:
            for window, count in zip(self.windows, in_windows, strict=False):
                window.available -= count
        return True

    def set_available(self, available: int, available_host: int, windows: Iterable[tuple[int, int]] = ()) -> None:
        """Set the counts of both tiers from the block manager, also of window kinds: reservations are over."""
        self.available = available
        self.available_host = available_host
        for window, counts in zip(self.windows, windows, strict=True):
            window.available, window.available_host = counts

    def grant(self, sequence: Sequence, change: TableChange, *, to_host: bool = False) -> None:
        """Apply a table change of a result: new blocks at the end, or all blocks in the other tier."""
        if to_host:
            self._swap_out_table(sequence, change)
            return
        if sequence.swapped:
            self._release_host_blocks(sequence)
            sequence.table, sequence.swapped = (), False
        if replaced := sequence.table[change.first_index :]:
            self._holders.subtract(replaced)
        sequence.table = (*sequence.table[: change.first_index], *change.block_ids)
        for block in change.block_ids:
            if not self._holders[block]:
                self._host_copies.pop(block, None)
                self.claims.cached.forget_block(block)
        self._holders.update(change.block_ids)
        sequence.room = change.room_tokens

    def fork(self, parent: Sequence, child: Sequence, length: int) -> None:
        """Share the parent's blocks below `length` with a new sequence, as the block manager does."""
        keep = self.blocks_for(length)
        self._release_blocks(parent.table[keep:])
        parent.table = child.table = parent.table[:keep]
        self._holders.update(child.table)
        for window in self.windows:
            window.fork(parent, child, keep)
        parent.room = child.room = length

    def trim(self, sequence: Sequence) -> bool:
        """Release the blocks that only computed tokens see in window kinds; return whether there were any."""
        position = sequence.computed
        if not any(window.trims(sequence, position) for window in self.windows):
            return False
        for window in self.windows:
            window.trim(sequence, position)
        return True

    def release(self, sequence: Sequence) -> None:
        """Remove the sequence's blocks; blocks without another holder become available."""
        for window in self.windows:
            window.release(sequence)
        if sequence.swapped:
            self._release_host_blocks(sequence)
        else:
            self._release_blocks(sequence.table)
        sequence.table, sequence.room, sequence.swapped = (), 0, False

    # Swapping.

    def begin_swap_out(self, sequences: Collection[Sequence]) -> None:
        """Count the device blocks of sequences that are swapped out as available, and reserve host blocks."""
        self.available_host -= self.host_cost({block for sequence in sequences for block in sequence.table})
        for sequence in sequences:
            self._release_blocks(sequence.table)
        for window in self.windows:
            window.begin_swap_out(sequences)

    def rollback_swap_out(self, sequences: Collection[Sequence]) -> None:
        """Restore the device blocks of sequences that were not swapped out. The counts were already set."""
        for sequence in sequences:
            self._holders.update(sequence.table)
        for window in self.windows:
            window.rollback_swap_out(sequences)

    def reset_cache(self) -> None:
        """Forget host copies and cached prefixes, as the block manager does at a reset."""
        self._host_copies.clear()
        self.claims.forget_cached()

    def _swap_out_table(self, sequence: Sequence, change: TableChange) -> None:
        for block, moved in zip(sequence.table, change.block_ids, strict=True):
            self._host_copies[block] = (moved, self._host_generations[moved])
        self._host_holders.update(change.block_ids)
        sequence.table, sequence.swapped = tuple(change.block_ids), True

    # Holders.

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a pin as a holder of a sequence's blocks."""
        self._holders.update(blocks)

    def unpin(self, blocks: Collection[int]) -> None:
        """Remove a pin; blocks without another holder become available."""
        self._release_blocks(blocks)

    def rollback_pin(self, blocks: Iterable[int]) -> None:
        """Remove a pin that was refused. The counts were already set."""
        self._holders.subtract(blocks)

    def _release_blocks(self, blocks: Collection[int]) -> None:
        self._holders.subtract(blocks)
        self.available += sum(self._holders[block] == 0 for block in blocks)

    def _release_host_blocks(self, sequence: Sequence) -> None:
        self._host_holders.subtract(sequence.table)
        self._host_generations.update(block for block in sequence.table if not self._host_holders[block])
