"""Small parts of sentences."""

from collections.abc import Iterable


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def verb(number: int, one: str = "was", more: str = "were") -> str:
    """Return the verb that goes with so many."""
    return one if number == 1 else more


def joined(parts: list[str]) -> str:
    """Join parts as in a sentence."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def listed(blocks: Iterable[int]) -> str:
    """Name blocks by their ids, runs of them by their first and last."""
    ids = list(blocks)
    if len(ids) == 1:
        return f"block {ids[0]}"
    runs: list[list[int]] = []
    for block in ids:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    named = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"blocks {joined(named)}"
