"""Block arithmetic."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Return how many blocks hold so many tokens."""
    return -(-tokens // block_size)
