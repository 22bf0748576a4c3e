"""Tables on the wire: one array per column; lists of lists are an array of entries and an array of counts."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

from services.runtime.errors import InvalidField

_Entries = TypeVar("_Entries", bound=Sequence[Any])


def split_by_counts(entries: _Entries, counts: Sequence[int], field: str) -> list[_Entries]:
    """Split entries into lists of the given counts. Raises InvalidField if the counts do not add up."""
    check_counts(field, counts, len(entries))
    return [entries[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]  # type: ignore[misc]


def check_counts(field: str, counts: Sequence[int], entries: int) -> None:
    """Raise InvalidField unless the counts add up to the number of entries."""
    if min(counts, default=0) < 0:
        raise InvalidField(f"{field}: counts must not be negative", field)
    if sum(counts) != entries:
        raise InvalidField(f"{field}: the counts add up to {sum(counts)}, but there are {entries} entries", field)


def check_columns(field: str, *columns: Sequence[object]) -> None:
    """Raise InvalidField unless all columns have the same length."""
    if len(set(map(len, columns))) > 1:
        raise InvalidField(f"{field}: the arrays differ in length", field)


def pairs(first: Sequence[int], second: Sequence[int], field: str) -> list[tuple[int, int]]:
    """Zip two columns. Raises InvalidField if their lengths differ."""
    try:
        return list(zip(first[:], second[:], strict=True))
    except ValueError as error:
        raise InvalidField(f"{field}: the arrays differ in length", field) from error
