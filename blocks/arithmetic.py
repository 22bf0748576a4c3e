"""Block arithmetic."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks that `tokens` tokens need; the last one may be partially filled."""
    return -(-tokens // block_size)
