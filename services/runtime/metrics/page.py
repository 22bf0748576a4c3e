"""Writes the metrics page on the event loop that owns the metrics, in slices, so that other tasks do not wait."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from services.runtime.metrics.compatible_names import with_counterparts
from services.runtime.metrics.vllm_names import VLLM

# Work between two pauses. Other tasks may need several turns of the event loop, and get them during a pause.
_SLICE_SECONDS = 0.0005
_PAUSE_SECONDS = 0.001
_SAMPLES_AT_ONCE = 25  # fits a slice even if their series are not cached
# Series cached as text: enough for some hundred engines.
_SERIES = 50_000


async def no_preparation() -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Exposition:
    """A service's metrics and their address; without an address they are not served.

    `prepare` is awaited before each scrape. `compat` is vllm to add vLLM's names, or none.
    """

    registry: CollectorRegistry
    address: str
    prepare: Callable[[], Awaitable[None]] = no_preparation
    compat: str = "none"


class MetricsPage:
    """The metrics as text, written for one scrape at a time."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._one_at_a_time = asyncio.Lock()

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        async with self._one_at_a_time:
            await self._exposition.prepare()
            metrics: Iterable[Metric] = self._exposition.registry.collect()
            if self._exposition.compat == VLLM:
                metrics = with_counterparts(metrics)
            return b"".join([part async for part in _with_pauses(_written(metrics))])


async def _with_pauses(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the parts, and pause after each slice of time."""
    begun = time.perf_counter()
    for part in parts:
        yield part
        if time.perf_counter() - begun > _SLICE_SECONDS:
            await asyncio.sleep(_PAUSE_SECONDS)
            begun = time.perf_counter()


def _written(metrics: Iterable[Metric]) -> Iterator[bytes]:
    """Write metrics, a few samples at a time."""
    for metric in metrics:
        yield generate_latest(_OneMetric(Metric(metric.name, metric.documentation, metric.type)))  # HELP and TYPE
        for start in range(0, len(metric.samples), _SAMPLES_AT_ONCE):
            yield "".join(map(_line, metric.samples[start : start + _SAMPLES_AT_ONCE])).encode()


def _line(sample: Sample) -> str:
    value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
    return f"{_series(sample.name, tuple(sample.labels.items()))}{value}\n"


@lru_cache(_SERIES)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Return the beginning of a series' lines; cached, because prometheus-client spends most of its time on it."""
    metric = Metric(name, "", "gauge")
    metric.add_sample(name, dict(labels), 0)
    return generate_latest(_OneMetric(metric)).decode().rstrip("\n").rpartition("\n")[2].removesuffix("0.0")


class _OneMetric(NamedTuple):
    """A registry of one metric."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)
