"""Writes what Prometheus reads: on the event loop that owns the figures, in slices that nobody there waits for long."""

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

# Between two pauses. Who else has work on the event loop goes through it several times, and comes through a pause.
_SLICE_SECONDS = 0.0005
_PAUSE_SECONDS = 0.001
_SAMPLES_AT_ONCE = 25  # also where none of their series was written before
# Series whose names and labels are kept as text: those of some hundred engines.
_SERIES = 50_000


async def nothing() -> None:
    """Prepare nothing."""


@dataclass(frozen=True)
class Exposition:
    """What a service shows and where; an empty address is nowhere.

    `prepare` is awaited before the registry is read. `compat` names whose names are used too: vllm, or none.
    """

    registry: CollectorRegistry
    address: str
    prepare: Callable[[], Awaitable[None]] = nothing
    compat: str = "none"


class MetricsPage:
    """The metrics as text, made anew whenever it is asked for, for one after the other."""

    def __init__(self, exposition: Exposition) -> None:
        self._exposition = exposition
        self._one_at_a_time = asyncio.Lock()

    async def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        async with self._one_at_a_time:
            await self._exposition.prepare()
            metrics: Iterable[Metric] = self._exposition.registry.collect()
            if self._exposition.compat == "vllm":
                metrics = with_counterparts(metrics)
            return b"".join([part async for part in _politely(_written(metrics))])


async def _politely(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """Make the parts, with a pause whenever that has taken long enough."""
    begun = time.perf_counter()
    for part in parts:
        yield part
        if time.perf_counter() - begun > _SLICE_SECONDS:
            await asyncio.sleep(_PAUSE_SECONDS)
            begun = time.perf_counter()


def _written(metrics: Iterable[Metric]) -> Iterator[bytes]:
    """Write metrics, so many samples at a time."""
    for metric in metrics:
        yield generate_latest(_Only(Metric(metric.name, metric.documentation, metric.type)))  # what they mean
        for start in range(0, len(metric.samples), _SAMPLES_AT_ONCE):
            yield "".join(map(_line, metric.samples[start : start + _SAMPLES_AT_ONCE])).encode()


def _line(sample: Sample) -> str:
    value = floatToGoString(sample.value)  # type: ignore[no-untyped-call]
    return f"{_series(sample.name, tuple(sample.labels.items()))}{value}\n"


@lru_cache(_SERIES)
def _series(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    """Write what each line of a series begins with; prometheus-client takes most of its time for just that."""
    metric = Metric(name, "", "gauge")
    metric.add_sample(name, dict(labels), 0)
    return generate_latest(_Only(metric)).decode().rstrip("\n").rpartition("\n")[2].removesuffix("0.0")


class _Only(NamedTuple):
    """A registry of one metric."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return (self.metric,)
