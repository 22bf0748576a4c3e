"""Decides whether a measured value meets its target.

A value on the wrong side of its target misses it. A value on the right side meets it only if the run was sound and
noise cannot explain the value.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from operator import ge, le, lt
from typing import Any, NamedTuple

MEETS: dict[str, Callable[[float, float], bool]] = {"less": lt, "at most": le, "more": ge}
LEAST_REPETITIONS = 5
MOST_FOREIGN_CORES = 0.05
_CONFIDENCE = 0.9
PEER_GOAL, CEILING_GOAL = 1.2, 0.85

Interval = tuple[float, float]


class Verdict(NamedTuple):
    """Whether a target is met; `met` is None if there is no target.

    `reason` lists, separated by semicolons, why a value on the right side of its target does not count. For a miss it
    only says whether the value is stale.
    """

    met: bool | None
    reason: str | None = None


@dataclass(frozen=True)
class Run:
    """What is known about the run that a value comes from. The defaults void nothing.

    `foreign_cores` is the CPU time of other processes in the worst repetition, divided by its duration. `behind` is how
    many later commits changed the measured code, or None if the repository does not have the run's commit.
    """

    commit: str | None = None
    repetitions: int = LEAST_REPETITIONS
    foreign_cores: float | None = None
    behind: int | None = 0
    other_cpu: bool = False


def verdict(
    value: float | None,
    target: Mapping[str, Any] | None,
    run: Run,
    *,
    null: Sequence[float] | None = None,
    limit: bool = False,
    exact: bool = False,
) -> Verdict:
    """Return whether a value meets a target of `bench/targets.toml`.

    `null` is the interval of the ratio when both sides run the same program. `limit` marks a share of a physical limit:
    a value above 1 is void. `exact` marks a value that every run repeats, which therefore needs no repetitions.
    """
    if target is None:
        return Verdict(None, _above_limit(value) if limit else None)
    if value is None:
        return Verdict(False)
    if not MEETS[target["better"]](value, target["target"]):
        return Verdict(False, _stale(run))
    reasons = [_above_limit(value) if limit else None, _undecided(value, target["target"], null), *_voids(run, exact)]
    reason = "; ".join(filter(None, [*reasons, _stale(run)]))
    return Verdict(not reason, reason or None)


def _above_limit(value: float | None) -> str | None:
    return "void: above a physical limit" if value is not None and value > 1 else None


def _undecided(value: float, target: float, null: Sequence[float] | None) -> str | None:
    """Return why noise may have decided: twice the width of the null interval exceeds the distance from 1.

    That distance is the target's, or the value's if the target is 1.
    """
    if null is None:
        return None
    asked = abs(target - 1) or abs(value - 1)
    if asked >= 2 * (null[1] - null[0]):
        return None
    return f"undecided: equal programs differ by {null[0]:.3g} to {null[1]:.3g}"


def _voids(run: Run, exact: bool) -> Iterator[str]:
    if run.commit is None:
        yield "void: its commit is not known"
    elif run.commit.endswith("-dirty"):
        yield "void: files differed from the commit"
    if not exact:
        yield from _disturbances(run)


def _stale(run: Run) -> str | None:
    if run.behind is None:
        return "stale: its commit is not in the repository"
    return f"stale: {run.behind} commit{'s' * (run.behind > 1)} behind" if run.behind else None


def _disturbances(run: Run) -> Iterator[str]:
    if run.repetitions < LEAST_REPETITIONS:
        yield f"void: only {run.repetitions} of the {LEAST_REPETITIONS} repetitions it needs"
    if run.foreign_cores is not None and run.foreign_cores > MOST_FOREIGN_CORES:
        yield f"void: other processes took {run.foreign_cores:.2g} of a core"
    if run.other_cpu:
        yield "void: another CPU than the newest results of its class"


def goal(over_peer: float | None, of_ceiling: float | None) -> tuple[float | None, str | None]:
    """Return the share of its goal that a speed reaches, and a text that compares it with both possible goals.

    There are two goals, PEER_GOAL times the better peer and CEILING_GOAL of the ceiling; the nearer one counts. A speed
    above the ceiling shows that the ceiling is wrong, so only the peer counts then. Returns None unless both are known.
    """
    if over_peer is None or of_ceiling is None:
        return None, None
    reached = {"peer": over_peer / PEER_GOAL} | ({"ceiling": of_ceiling / CEILING_GOAL} if of_ceiling <= 1 else {})
    through = max(reached, key=lambda name: reached[name])
    both = f"{over_peer:.3g} of the peer, wanted {PEER_GOAL}; {of_ceiling:.3g} of the ceiling, wanted {CEILING_GOAL}"
    return round(reached[through], 3), f"{both}: through the {through}"


def null_interval(first: Sequence[float], again: Sequence[float]) -> Interval:
    """Return the interval of the ratios' median when the same program runs twice in each repetition.

    It is bounded by order statistics and holds the true median with a confidence of 0.9 or, with fewer than five
    repetitions, is the whole range. https://en.wikipedia.org/wiki/Order_statistic
    """
    ratios = sorted(one / other for one, other in zip(first, again, strict=True))
    count = len(ratios)
    outside = max((one for one in range((count + 1) // 2) if _confidence(count, one) >= _CONFIDENCE), default=0)
    return round(ratios[outside], 4), round(ratios[count - 1 - outside], 4)


def _confidence(count: int, outside: int) -> float:
    """Return the probability that the median lies within `count` sorted samples without `outside` at each end."""
    below = sum(comb(count, number) for number in range(outside + 1))
    return 1 - 2 * below / 2.0**count
