"""Tables on the wire: an array for each column, and for lists of lists one of their entries and one of their counts."""

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


def check_columns(field: str, *columns: Sequence[object]) -> None:
    """Raise InvalidField unless the columns of a table have one length."""
    if len(set(map(len, columns))) > 1:
        raise InvalidField(f"{field}: its arrays differ in length", field)


def pairs(first: Sequence[int], second: Sequence[int], field: str) -> list[tuple[int, int]]:
    """Put two columns side by side. Raises InvalidField where they differ in length."""
    try:
        return list(zip(first[:], second[:], strict=True))
    except ValueError as error:
        raise InvalidField(f"{field}: its two arrays differ in length", field) from error
