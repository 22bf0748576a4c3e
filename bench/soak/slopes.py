"""Robust slopes of samples, and whether they are flat."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from bench.soak.samples import ProcessSample

# Measured at rest: under load connections and threads come and go.
AT_REST = ("file_descriptors", "threads", "series")
MEMORY = ("anonymous_mib", "rss_mib")
# Of the time of a run: the warm-up of an incarnation, and the least time after it for a verdict.
_WARM_UP, _MAX_WARM_UP_SECONDS = 0.2, 300.0
_JUDGED = 0.3
LEAST_RESTS = 5


class Slopes(NamedTuple):
    """The slopes of one incarnation of a process, per minute; `judged` is False if it was too short-lived."""

    process: str
    incarnation: int
    minutes: float
    judged: bool
    per_minute: Mapping[str, float | None]

    def as_json(self) -> dict[str, Any]:
        """Return the slopes rounded, with the incarnation."""
        rounded = {name: None if one is None else round(one, 4) for name, one in self.per_minute.items()}
        return self._asdict() | {"minutes": round(self.minutes, 2), "per_minute": rounded}


def theil_sen(times: Iterable[float], values: Iterable[float]) -> float | None:
    """Return the median slope of all pairs of points, None for fewer than two times.

    Less than 29 % of outliers do not move it.
    """
    x, y = np.asarray(list(times), float), np.asarray(list(values), float)
    one, other = np.triu_indices(len(x), 1)
    apart = x[other] != x[one]
    if not apart.any():
        return None
    return float(np.median(((y[other] - y[one])[apart]) / ((x[other] - x[one])[apart])))


def slopes_of(samples: Iterable[ProcessSample], run_seconds: float) -> list[Slopes]:
    """Return the slopes of each incarnation after its warm-up, in the order of processes."""
    ordered = sorted(samples, key=lambda one: (one.process, one.incarnation, one.seconds))
    groups = groupby(ordered, key=lambda one: (one.process, one.incarnation))
    return [_slopes(process, number, list(group), run_seconds) for (process, number), group in groups]


def worst(slopes: Iterable[Slopes], process: str, metric: str) -> float | None:
    """Return the steepest rise among the judged incarnations of a process, None without any."""
    found = [one.per_minute[metric] for one in slopes if one.judged and one.process.startswith(process)]
    return max((one for one in found if one is not None), default=None)


def warm_samples(samples: Sequence[ProcessSample], run_seconds: float) -> list[ProcessSample]:
    """Return the samples of an incarnation after its warm-up."""
    begin = _end_of_warm_up(samples, run_seconds)
    return [one for one in samples if one.seconds >= begin]


def _end_of_warm_up(samples: Sequence[ProcessSample], run_seconds: float) -> float:
    return samples[0].seconds + min(_WARM_UP * run_seconds, _MAX_WARM_UP_SECONDS)


def _slopes(process: str, number: int, samples: list[ProcessSample], run_seconds: float) -> Slopes:
    warm = warm_samples(samples, run_seconds)
    seconds = warm[-1].seconds - _end_of_warm_up(samples, run_seconds) if warm else 0.0
    at_rest = [one for one in warm if one.resting]
    per_minute = {name: _slope(warm, name) for name in MEMORY} | {name: _slope(at_rest, name) for name in AT_REST}
    return Slopes(process, number, seconds / 60, seconds >= _JUDGED * run_seconds, per_minute)


def _slope(samples: list[ProcessSample], name: str) -> float | None:
    return theil_sen([one.seconds / 60 for one in samples], [getattr(one, name) for one in samples])
