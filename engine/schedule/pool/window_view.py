"""The engine's view of the blocks of one window kind: like `PoolView` for kind 0, without prefixes."""

from collections import Counter
from collections.abc import Collection, Iterable

from blocks import TableChange, WindowKind, blocks_for
from engine.schedule.sequence_group import Sequence

Table = tuple[int, ...]


class WindowView:
    """Owns the tables of sequences in one window kind, and its available blocks.

    A table has an entry for each logical block, as that of kind 0. Blocks that have left the window are 0.
    """

    def __init__(self, index: int, kind: WindowKind, block_size: int) -> None:
        """Start with an empty pool. `index` is the kind's place among the window kinds."""
        self.kind = kind
        self.available = kind.device_blocks
        self.available_host = kind.host_blocks
        self._index = index
        self._size = block_size
        self._holders: Counter[int] = Counter()

    def table(self, sequence: Sequence) -> Table:
        """Return a sequence's table, empty if it has none."""
        return sequence.window_tables[self._index] if len(sequence.window_tables) > self._index else ()

    def live(self, sequences: Iterable[Sequence]) -> set[int]:
        """Return the blocks that sequences hold, in either tier."""
        return {block for sequence in sequences for block in self.table(sequence) if block}

    def cost(self, rooms: Iterable[tuple[Sequence, int]]) -> int:
        """Return the number of blocks that this room (in tokens) needs, including copies of shared blocks."""
        blocks, moved = 0, Counter[int]()
        for sequence, room in rooms:
            table, needed = self.table(sequence), blocks_for(room, self._size)
            blocks += max(0, needed - len(table))
            for block in table[sequence.room // self._size : needed]:
                if self._holders[block] - moved[block] > 1:
                    moved[block] += 1
                    blocks += 1
        return blocks

    def rest(self, members: Iterable[tuple[Sequence, int]], step_tokens: int) -> int:
        """Return the blocks that sequences need for the rest of their known tokens.

        Each needs its window; a step computes at most `step_tokens` tokens, whosever they are. What sequences hold for
        the step in flight is free for the next one.
        """
        rest = beside = unfinished = 0
        for sequence, tokens in members:
            held = len(self.live((sequence,)))
            most = min(blocks_for(tokens, self._size), self.kind.most_blocks(1, self._size))
            rest += max(0, most - held)
            beside += max(0, held - most)
            unfinished += tokens - sequence.computed
        return rest + max(0, blocks_for(min(unfinished, step_tokens), self._size) - beside)

    # Tables.

    def grant(self, sequence: Sequence, change: TableChange, *, to_host: bool) -> None:
        """Apply a table change of a result, before kind 0 does."""
        if to_host:
            self._set(sequence, (0,) * change.first_index + tuple(change.block_ids))
            return
        table = () if sequence.swapped else self.table(sequence)
        replaced = table[change.first_index :]
        self._holders.subtract(block for block in replaced if block)
        kept = table[: change.first_index] or (0,) * change.first_index
        self._set(sequence, (*kept, *change.block_ids))
        self._holders.update(change.block_ids)

    def trims(self, sequence: Sequence, position: int) -> bool:
        """Return whether a block of the table leaves the window with the queries below a position."""
        last = self.kind.first_block(position, self._size)
        return last > 0 and self.table(sequence)[last - 1] != 0

    def trim(self, sequence: Sequence, position: int) -> None:
        """Release the blocks that only queries below a position see."""
        table, last = self.table(sequence), self.kind.first_block(position, self._size)
        self._release([block for block in table[:last] if block])
        self._set(sequence, (0,) * last + table[last:])

    def fork(self, parent: Sequence, child: Sequence, blocks: int) -> None:
        """Share the parent's first `blocks` logical blocks with a new sequence, as the block manager does."""
        table = self.table(parent)
        self._release(table[blocks:])
        self._set(parent, table[:blocks])
        self._set(child, table[:blocks])
        self._holders.update(block for block in table[:blocks] if block)

    def release(self, sequence: Sequence) -> None:
        """Remove the sequence's blocks; blocks without another holder become available."""
        if not sequence.swapped:
            self._release([block for block in self.table(sequence) if block])
        self._set(sequence, ())

    def _set(self, sequence: Sequence, table: Table) -> None:
        windows = list(sequence.window_tables)
        windows += [()] * (self._index + 1 - len(windows))
        windows[self._index] = table
        sequence.window_tables = tuple(windows)

    def _release(self, blocks: Collection[int]) -> None:
        self._holders.subtract(blocks)
        self.available += sum(self._holders[block] == 0 for block in blocks)

    # Swapping.

    def begin_swap_out(self, sequences: Collection[Sequence]) -> None:
        """Count the device blocks of sequences that are swapped out as available, and reserve host blocks."""
        self.available_host -= len(self.live(sequences))
        for sequence in sequences:
            self._release([block for block in self.table(sequence) if block])

    def rollback_swap_out(self, sequences: Iterable[Sequence]) -> None:
        """Restore the device blocks of sequences that were not swapped out. The counts were already set."""
        for sequence in sequences:
            self._holders.update(block for block in self.table(sequence) if block)

    # Pins.

    def pinned(self, sequence: Sequence, blocks: int) -> Table:
        """Return the blocks that a pin of a sequence's first `blocks` logical blocks holds."""
        return self.table(sequence)[self.kind.first_block(blocks * self._size, self._size) : blocks]

    def pinned_count(self, blocks: int) -> int:
        """Return how many blocks a pin of a sequence's first `blocks` logical blocks holds."""
        return blocks - min(blocks, self.kind.first_block(blocks * self._size, self._size))

    def pin(self, blocks: Iterable[int]) -> None:
        """Add a pin as a holder."""
        self._holders.update(blocks)

    def unpin(self, blocks: Collection[int]) -> None:
        """Remove a pin; blocks without another holder become available."""
        self._release(blocks)

    def rollback_pin(self, blocks: Iterable[int]) -> None:
        """Remove a pin that was refused. The counts were already set."""
        self._holders.subtract(blocks)
