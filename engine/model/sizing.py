"""How many blocks fit into memory, and what they hold: numbers alone.

The engine sizes its pool by it, and `quire plan` foretells that.
"""

from dataclasses import dataclass

from blocks import blocks_for

# Per token of the vocabulary and sampled row: logits, their float32 copies, order, probabilities and noise.
_SAMPLING_BYTES = 48


def blocks_within(memory_bytes: int, block_bytes: int) -> int:
    """Return the usable blocks of a cache that takes no more than this memory, 0 where not even one fits.

    Block 0, which belongs to nobody, takes its part of the memory and is not counted.
    """
    return max(0, memory_bytes // block_bytes - 1)


def cache_bytes(blocks: int, block_bytes: int) -> int:
    """Return the bytes of a cache of so many usable blocks, block 0 included; 0 where there are none."""
    return (blocks + 1) * block_bytes if blocks else 0


@dataclass(frozen=True)
class StepSizes:
    """What the memory of one step depends on: its bounds, and a model's widths in elements.

    `inner_size` is what an MLP makes of one token, with several experts of all that it goes to.
    """

    token_budget: int
    max_sequences: int
    hidden_size: int
    inner_size: int
    vocabulary_size: int

    def bytes(self, element_bytes: int) -> int:
        """Return an upper estimate of what a step needs beside weights and cache: activations, and sampling.

        Scores of whole prompts (prompt log-probabilities) and the gathers of the backend `torch` come on top.
        """
        activations = self.token_budget * (8 * self.hidden_size + 4 * self.inner_size) * element_bytes
        return activations + self.max_sequences * self.vocabulary_size * _SAMPLING_BYTES


@dataclass(frozen=True)
class PoolSize:
    """A pool of blocks, and how many requests of a length it holds at the same time when none shares a block."""

    block_size: int
    blocks: int

    @property
    def tokens(self) -> int:
        """Slots of all blocks."""
        return self.blocks * self.block_size

    def blocks_of(self, tokens: int) -> int:
        """Return the blocks of a request of so many tokens in all; the last one is never fed, so it needs no slot."""
        return blocks_for(max(1, tokens - 1), self.block_size)

    def requests(self, tokens: int) -> int:
        """Return how many requests of so many tokens fit in blocks: what paging makes of the memory."""
        return self.blocks // self.blocks_of(tokens)

    def reserved_requests(self, context_tokens: int) -> int:
        """Return how many fit where each reserves its longest length in one piece, as systems without paging do."""
        return self.tokens // context_tokens

    def last_block_waste(self) -> float:
        """Return the mean slots of a sequence's last block that stay empty, where all lengths are as likely."""
        return (self.block_size - 1) / 2
