"""Counts of blocks, and counts in messages."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks that `tokens` tokens need; the last one may be partially filled."""
    return -(-tokens // block_size)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun in the singular or plural."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
