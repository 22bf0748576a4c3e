"""Breakdown of the slots in held blocks."""

from collections.abc import Iterable
from typing import NamedTuple

from kvmanager.pool_state import SequenceTable
from kvmanager.tier.tier import Tier


class Slots(NamedTuple):
    """Breakdown of the slots in held device blocks, one slot per token, as in Figure 2 of the PagedAttention paper.

    `tokens` are computed; those of shared blocks count once. `reserved` will be written by the running prefill.
    `lookahead` are in blocks that were granted ahead, `internal` are unused in partially filled blocks.
    """

    tokens: int
    reserved: int
    lookahead: int
    internal: int


class SlotCounter:
    """Counts slots by sequences, some at a time.

    It does not iterate over whole tables: shared blocks are usually full, so only blocks that a holder has not filled
    are checked for sharing.
    """

    def __init__(self, device: Tier, block_size: int) -> None:
        self._device = device
        self._size = block_size
        self._computed = 0
        self._reserved = 0
        self._lookahead_blocks = 0
        self._unfilled: dict[int, list[int]] = {}  # by shared block: tokens of each holder that has not filled it

    def add(self, sequences: Iterable[SequenceTable]) -> None:
        """Count sequences; swapped ones have no device slots."""
        size, any_shared = self._size, self._device.shared
        for sequence in sequences:
            if sequence.swapped:
                continue
            end = computed = sequence.computed_tokens
            if computed < sequence.prompt_tokens:
                end = max(computed, min(sequence.prompt_tokens, sequence.room_tokens))
                self._reserved += end - computed
            self._computed += computed
            self._lookahead_blocks += len(sequence.table) + -end // size
            if any_shared:
                self._add_unfilled(sequence)

    def _add_unfilled(self, sequence: SequenceTable) -> None:
        full, tokens = divmod(sequence.computed_tokens, self._size)
        for block in sequence.table[full:]:
            if self._device.ref_count(block) > 1:
                self._unfilled.setdefault(block, []).append(tokens)
            tokens = 0

    def slots(self, pinned: int) -> Slots:
        """Return the breakdown. `pinned` is the sum of the lengths of all pins."""
        size, device = self._size, self._device
        tokens = size * (pinned - device.saved) + self._computed
        for block, fills in self._unfilled.items():
            most = size if device.ref_count(block) > len(fills) else max(fills)
            tokens += most - sum(fills) + size * (len(fills) - 1)
        held = size * device.counts.held
        tokens = max(0, min(tokens, held))  # blocks may have been freed between two slices
        rest = held - tokens - self._reserved - size * self._lookahead_blocks
        return Slots(tokens, self._reserved, size * self._lookahead_blocks, max(0, rest))
