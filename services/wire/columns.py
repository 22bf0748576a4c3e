"""Lists of lists on the wire: all their entries in one array, and how many belong to each in another."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

from services.runtime.errors import InvalidField

_Entries = TypeVar("_Entries", bound=Sequence[Any])


def parted(entries: _Entries, counts: Sequence[int], field: str) -> list[_Entries]:
    """Return the parts of some entries, each with its count. Raises InvalidField where the counts are not theirs."""
    check_counts(field, counts, len(entries))
    return [entries[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]  # type: ignore[misc]


def check_counts(field: str, counts: Sequence[int], entries: int) -> None:
    """Raise InvalidField unless the counts share so many entries out."""
    if min(counts, default=0) < 0:
        raise InvalidField(f"{field}: there is a count below 0", field)
    if sum(counts) != entries:
        raise InvalidField(f"{field}: counts of {sum(counts)} entries in all, but there are {entries}", field)
