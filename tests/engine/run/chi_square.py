"""Chi-square tests of sampled tokens."""

import math
from collections import Counter
from collections.abc import Sequence

# Rarer tokens are counted together, because the test needs expected counts of five or more.
_LEAST_EXPECTED = 5.0


def chi_square_is_likely(counts: Counter[int], chances: Sequence[float]) -> bool:
    """Return True if a chi-square test accepts the draws, at a significance of 0.1 %.

    A token of probability 0 must not occur.
    """
    draws = counts.total()
    assert all(chances[token] > 0 for token in counts), "a token of probability 0 was drawn"
    cells = [(counts[token], draws * chance) for token, chance in enumerate(chances)]
    common = [cell for cell in cells if cell[1] >= _LEAST_EXPECTED]
    rare = [sum(column) for column in zip(*(cell for cell in cells if cell[1] < _LEAST_EXPECTED), strict=True)]
    if rare and rare[1] >= _LEAST_EXPECTED:
        common.append((int(rare[0]), rare[1]))
    statistic = sum((count - expected) ** 2 / expected for count, expected in common)
    return statistic < _critical(len(common) - 1)


def _critical(freedom: int) -> float:
    """Return the 99.9 % quantile of chi-square (Wilson and Hilferty, 1931)."""
    part = 2 / (9 * freedom)
    return freedom * (1 - part + 3.0902 * math.sqrt(part)) ** 3
