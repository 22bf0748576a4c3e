"""Kinds of blocks: layers that need the same tokens keep them in blocks of one kind.

Kind 0 keeps all tokens, and every pool has it. The others are window kinds: a layer with a window of tokens, or with
chunks, needs only the latest ones, so that the leading blocks of a sequence can be released while it runs.
"""

from dataclasses import dataclass

from blocks.arithmetic import blocks_for

# The name of kind 0, which no window kind may have.
KIND_0 = "all"


@dataclass(frozen=True)
class WindowKind:
    """Blocks of layers that see a window of `tokens` tokens; if `chunked`, the chunk of `tokens` tokens they are in.

    `layers` and `block_bytes`, the size of a block in all of them, describe the kind to people.
    """

    name: str
    tokens: int
    device_blocks: int
    host_blocks: int = 0
    chunked: bool = False
    layers: int = 0
    block_bytes: int = 0

    def first_token(self, position: int) -> int:
        """Return the first token that the query at a position sees."""
        if self.chunked:
            return position - position % self.tokens
        return max(0, position - self.tokens + 1)

    def first_block(self, position: int, block_size: int) -> int:
        """Return the first logical block that the query at a position, and each later one, needs."""
        return self.first_token(position) // block_size

    def most_blocks(self, tokens: int, block_size: int) -> int:
        """Return the most blocks that a sequence needs while `tokens` more tokens are computed at once."""
        return blocks_for(self.tokens - 1 + tokens, block_size) + 1
