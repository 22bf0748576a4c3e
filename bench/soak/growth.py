"""How much allocated memory grows with each request, and whether that is flat.

A slope over the time depends on the load: 1 MiB a minute is nothing at a hundred requests a second, and a leak of every
request at five. Memory is therefore compared at rests, with the requests that have ended by then.
"""

from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bench.soak.samples import ProcessSample
from bench.soak.slopes import LEAST_RESTS, warm_samples

Column = npt.NDArray[np.float64]

_MIB = 1 << 20
# Of the normal distribution: 90 % are within so many standard deviations.
_WITHIN_90 = 1.645


class Growth(NamedTuple):
    """Bytes for each request of the load, with an interval of 90 % confidence, of one incarnation after its warm-up."""

    process: str
    incarnation: int
    rests: int
    requests: int
    bytes_per_request: float
    low: float
    high: float

    def as_json(self) -> dict[str, Any]:
        """Return the growth rounded."""
        rounded = {name: round(getattr(self, name), 1) for name in ("bytes_per_request", "low", "high")}
        return self._asdict() | rounded

    def words(self, limit: float) -> str:
        """Say whether it is flat: surely at most the limit."""
        name, between = f"{self.process} ({self.requests} requests)", f"{self.low:.0f} to {self.high:.0f}"
        if self.high <= limit:
            return f"{name}: flat: grows by {between} bytes a request, at most {limit:g} are allowed"
        if self.low > limit:
            return f"{name}: grows by {between} bytes a request, more than the {limit:g} that are allowed"
        return f"{name}: undecided: grows by {between} bytes a request, {limit:g} are allowed; a longer run decides"


def growths_of(samples: Iterable[ProcessSample], run_seconds: float) -> list[Growth]:
    """Return the growth of each incarnation that has enough rests, in the order of processes."""
    ordered = sorted(samples, key=lambda one: (one.process, one.incarnation, one.seconds))
    groups = groupby(ordered, key=lambda one: (one.process, one.incarnation))
    found = [_growth(process, number, list(group), run_seconds) for (process, number), group in groups]
    return [one for one in found if one is not None]


def largest(growths: Iterable[Growth], service: str) -> float | None:
    """Return the highest upper bound of a service's processes; None if none had enough rests."""
    return max((one.high for one in growths if one.process.startswith(service)), default=None)


def _growth(process: str, number: int, samples: list[ProcessSample], run_seconds: float) -> Growth | None:
    rests = [one for one in warm_samples(samples, run_seconds) if one.requests is not None]
    x = np.array([one.requests for one in rests], float)
    if len(rests) < LEAST_RESTS or not np.ptp(x):
        return None
    y = np.array([one.anonymous_mib * _MIB for one in rests])
    return Growth(process, number, len(rests), int(np.ptp(x)), *_slope(x, y))


def _slope(x: Column, y: Column) -> tuple[float, float, float]:
    """Return the median slope of all pairs (Theil-Sen), and its interval by the variance of Kendall's tau.

    A rest at which memory was not yet returned moves neither of them far.
    https://en.wikipedia.org/wiki/Theil%E2%80%93Sen_estimator
    """
    one, other = np.triu_indices(len(x), 1)
    apart = x[other] != x[one]
    slopes = np.sort(((y[other] - y[one])[apart]) / ((x[other] - x[one])[apart]))
    count = len(x)
    within = _WITHIN_90 * np.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low, high = int((len(slopes) - within) / 2), int(np.ceil((len(slopes) + within) / 2))
    return float(np.median(slopes)), float(slopes[max(0, low)]), float(slopes[min(len(slopes) - 1, high)])
