"""The terms on which each side of a comparison ran. Sides that differ are refused, unless the row's name says so."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations

_SHORT = {"bfloat16": "bf16", "float32": "f32", "1_processes": "in_process", "1_threads": "one_thread"}
AS_USERS_RUN_IT = "as_users_run_it"
# A server is as many processes as its program makes it.
AS_SERVERS = "as_servers"


class UnequalTerms(ValueError):
    """Two sides of a comparison ran on different terms, and the row's name does not say so."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a program computed with. Types of numbers are None for work without a model.

    `threads` are those that compute, `processes` those that serve one request, `work` names the workload, and `start`
    is `warm` after an uncounted repetition, else `cold`.
    """

    weights: str | None = None
    activations: str | None = None
    kv_cache: str | None = None
    threads: int = 1
    processes: int = 1
    work: str
    start: str = "warm"


def check_equal(metric: str, sides: Mapping[str, Terms]) -> None:
    """Raise UnequalTerms if two sides differ in something that the metric's name does not state.

    A name states a difference by one of its two values, such as `int4`, `float32`, `in_process` or `3_processes`, or
    all differences by the words `as_users_run_it`. The words `as_servers` state another number of processes only.
    """
    if AS_USERS_RUN_IT in metric:
        return
    for (one, ours), (other, theirs) in combinations(sides.items(), 2):
        for field, values in _differences(ours, theirs):
            stated = field == "processes" and AS_SERVERS in metric
            if not stated and not any(word in metric for value in values for word in _words(field, value)):
                raise UnequalTerms(f"{metric}: {field} is {values[0]} of {one}, but {values[1]} of {other}")


def _differences(ours: Terms, theirs: Terms) -> Iterator[tuple[str, tuple[object, object]]]:
    own, other = asdict(ours), asdict(theirs)
    return ((field, (own[field], other[field])) for field in own if own[field] != other[field])


def _words(field: str, value: object) -> set[str]:
    """Return what a name may call a value. A type of numbers is called by itself, a number with what it counts."""
    if value is None:
        return set()
    text = f"{value}_{field}" if isinstance(value, int) else str(value)
    word = re.sub(r"\W+", "_", text.lower())
    return {word, _SHORT.get(word, word)}
