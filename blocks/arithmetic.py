"""Block arithmetic."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks that `tokens` tokens fill, the last one perhaps in part."""
    return -(-tokens // block_size)
