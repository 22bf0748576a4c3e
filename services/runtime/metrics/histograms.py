"""Histograms for hot paths: an observation takes a search and two additions, without a lock.

One thread observes; scrapes read. prometheus-client takes a lock three times for each observation.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString


class Buckets:
    """One series of a histogram: observations per bucket, and their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of all buckets but the last, ascending."""
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> tuple[list[int], float]:
        """Return the cumulative counts of the buckets, and the sum of all values."""
        return list(accumulate(list(self._counts))), self._sum


class _Series(NamedTuple):
    """A series, its labels, and the labels of each bucket."""

    buckets: Buckets
    labels: dict[str, str]
    of_each: list[dict[str, str]]


class Histogram(Collector):
    """A histogram with labels, registered for good."""

    def __init__(
        self, registry: CollectorRegistry, name: str, meaning: str, labels: Sequence[str], bounds: Sequence[float]
    ) -> None:
        """Register under `name`."""
        self._name = name
        self._meaning = meaning
        self._labels = labels
        self._bounds = bounds
        self._written = [*map(floatToGoString, bounds), "+Inf"]
        self._series: dict[tuple[str, ...], _Series] = {}
        registry.register(self)

    def labels(self, *labels: str) -> Buckets:
        """Return the series with these label values; it is exported from its first use on."""
        series = self._series.get(labels) or self._begin(labels)
        return series.buckets

    def _begin(self, values: tuple[str, ...]) -> _Series:
        labels = dict(zip(self._labels, values, strict=True))
        of_each = [labels | {"le": bound} for bound in self._written]
        self._series[values] = _Series(Buckets(self._bounds), labels, of_each)
        return self._series[values]

    def remove(self, *labels: str) -> None:
        """Stop exporting the series with these label values."""
        self._series.pop(labels, None)

    def collect(self) -> Iterable[Metric]:
        """Return all series."""
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        for buckets, labels, of_each in list(self._series.values()):
            counts, total = buckets.read()
            family.samples += map(Sample, repeat(f"{self._name}_bucket"), of_each, counts)
            family.add_sample(f"{self._name}_count", labels, counts[-1])
            family.add_sample(f"{self._name}_sum", labels, total)
        return [family]

    def describe(self) -> Iterable[Metric]:
        """Return the metric without series."""
        return [HistogramMetricFamily(self._name, self._meaning, labels=self._labels)]
