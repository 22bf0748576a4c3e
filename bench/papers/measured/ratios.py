"""Ratios of measured times, and their medians in other units."""

from collections.abc import Mapping, Sequence
from statistics import median

MILLI, MICRO = 1e-3, 1e-6


def times_as_long(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return our seconds over theirs of the same repetition: the median."""
    return round(median(our / their for our, their in zip(ours, theirs, strict=True)), 4)


def medians(seconds: Mapping[str, Sequence[float]], unit: float) -> dict[int, float]:
    """Return the medians in a unit (seconds) by length, for seconds by the length's digits."""
    return {int(length): round(median(values) / unit, 4) for length, values in seconds.items()}
