"""What the slots of held blocks are good for."""

from collections.abc import Iterable
from typing import NamedTuple

from kvmanager.pool_state import SequenceTable
from kvmanager.tier.tier import Tier


class Slots(NamedTuple):
    """What the slots of held device blocks are good for, in tokens, as in Figure 2 of the PagedAttention paper.

    `tokens` are computed, those of shared blocks counted once. `reserved` will be written by the running prefill.
    `lookahead` are the slots of blocks that were granted ahead, `internal` those left in blocks that are begun.
    """

    tokens: int
    reserved: int
    lookahead: int
    internal: int


class SlotCount:
    """Counts slots, some sequences at a time.

    It looks at sequences, not at all blocks of their tables: whoever shares a block usually has it full, so only shared
    blocks that a holder has not filled need a closer look.
    """

    def __init__(self, device: Tier, block_size: int) -> None:
        self._device = device
        self._size = block_size
        self._computed = 0
        self._reserved = 0
        self._lookahead_blocks = 0
        self._unfilled: dict[int, list[int]] = {}  # shared blocks: tokens of each holder that has not filled it

    def add(self, sequences: Iterable[SequenceTable]) -> None:
        """Count sequences; those in host memory have no slots."""
        size, any_shared = self._size, self._device.shared
        for sequence in sequences:
            if sequence.swapped:
                continue
            end = computed = sequence.computed
            if computed < sequence.prompt:
                end = max(computed, min(sequence.prompt, sequence.room))
                self._reserved += end - computed
            self._computed += computed
            self._lookahead_blocks += len(sequence.table) + -end // size
            if any_shared:
                self._look_at_unfilled(sequence)

    def _look_at_unfilled(self, sequence: SequenceTable) -> None:
        full, tokens = divmod(sequence.computed, self._size)
        for block in sequence.table[full:]:
            if self._device.count(block) > 1:
                self._unfilled.setdefault(block, []).append(tokens)
            tokens = 0

    def slots(self, pinned: int) -> Slots:
        """Return the sums, where pins hold so many blocks, counted for each pin."""
        size, device = self._size, self._device
        tokens = size * (pinned - device.saved) + self._computed
        for block, fills in self._unfilled.items():
            most = size if device.count(block) > len(fills) else max(fills)
            tokens += most - sum(fills) + size * (len(fills) - 1)
        held = size * device.counts.held
        tokens = max(0, min(tokens, held))  # what was freed between two slices is not held any more
        rest = held - tokens - self._reserved - size * self._lookahead_blocks
        return Slots(tokens, self._reserved, size * self._lookahead_blocks, max(0, rest))
