"""How a cache's memory is divided among kinds of blocks.

A window kind receives the blocks of one window for each sequence that fits into the memory, and those of the tokens
that two steps compute. Kind 0 receives the rest.
"""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from blocks import blocks_for
from engine.kinds.layer_kinds import LayerKind, most_blocks
from engine.model.sizing import cache_bytes

# The step in flight, and the one whose blocks are requested meanwhile.
_STEPS_AHEAD = 2
# Blocks of a kind 0 without bytes, at most: an eighth of what a KV manager has by default for all its engines and both
# tiers, where each block takes memory. 64 sequences of 128k tokens have as many.
MAX_COUNTING_BLOCKS = 1 << 19


@dataclass(frozen=True)
class SplitSizes:
    """What the split depends on: limits of a step, the longest request, and the tokens of a typical one."""

    block_size: int
    context_tokens: int
    token_budget: int
    max_sequences: int
    typical_tokens: int

    def window_blocks(self, kind: LayerKind, sequences: int) -> int:
        """Return the blocks of a window kind for this number of sequences."""
        each = most_blocks(kind, self.context_tokens, self.block_size, self.block_size)
        ahead = blocks_for(_STEPS_AHEAD * self.token_budget, self.block_size)
        return min(sequences * each + ahead, sequences * blocks_for(self.context_tokens, self.block_size))


def split_memory(
    kinds: Sequence[LayerKind], block_bytes: Sequence[int], memory_bytes: int, sizes: SplitSizes
) -> tuple[int, ...]:
    """Return the device blocks of each kind that fit into this memory; those of kind 0 are 0 if none fits.

    `block_bytes` has the bytes of a block of each kind. Block 0 of each kind takes memory, too.
    """
    typical = blocks_for(sizes.typical_tokens, sizes.block_size)

    def windows_of(sequences: int) -> list[int]:
        return [sizes.window_blocks(kind, sequences) for kind in kinds[1:]]

    def takes(sequences: int) -> int:
        windows = zip(windows_of(sequences), block_bytes[1:], strict=True)
        own = cache_bytes(sequences * typical, block_bytes[0])
        return own + sum(cache_bytes(blocks, one) for blocks, one in windows)

    sequences = max(1, bisect(range(1, sizes.max_sequences + 1), memory_bytes, key=takes))
    windows = windows_of(sequences)
    left = memory_bytes - sum(cache_bytes(blocks, one) for blocks, one in zip(windows, block_bytes[1:], strict=True))
    if not block_bytes[0]:  # all layers have windows: kind 0 counts tokens, and has no bytes
        most = sizes.max_sequences * blocks_for(sizes.context_tokens, sizes.block_size)
        return (min(most, MAX_COUNTING_BLOCKS) if left >= 0 else 0, *windows)
    return (max(0, left // block_bytes[0] - 1), *windows)


def split_blocks(kinds: Sequence[LayerKind], device_blocks: int, sizes: SplitSizes) -> tuple[int, ...]:
    """Return the device blocks of each kind beside `device_blocks` of kind 0: no window kind needs more than that."""
    return (device_blocks, *[min(device_blocks, sizes.window_blocks(kind, sizes.max_sequences)) for kind in kinds[1:]])


def host_blocks_of(kinds: Sequence[LayerKind], host_blocks: int, sizes: SplitSizes) -> tuple[int, ...]:
    """Return the host blocks of each kind beside `host_blocks` of kind 0, in the proportion of a typical request."""
    typical = max(1, blocks_for(sizes.typical_tokens, sizes.block_size))
    shares = [most_blocks(kind, sizes.context_tokens, sizes.block_size, sizes.block_size) for kind in kinds[1:]]
    return (host_blocks, *[min(host_blocks, -(-host_blocks * share // typical)) for share in shares])


def host_blocks_within(
    kinds: Sequence[LayerKind], block_bytes: Sequence[int], memory_bytes: int, sizes: SplitSizes
) -> int:
    """Return how many host blocks kind 0 gets if all kinds share this memory."""

    def takes(host_blocks: int) -> int:
        hosts = host_blocks_of(kinds, host_blocks, sizes)
        return sum(cache_bytes(blocks, one) for blocks, one in zip(hosts, block_bytes, strict=True))

    most = memory_bytes // block_bytes[0] if block_bytes[0] else MAX_COUNTING_BLOCKS
    return bisect(range(1, most + 1), memory_bytes, key=takes)
