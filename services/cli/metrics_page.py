"""Writes what Prometheus reads: on the event loop that owns the figures, in slices that nobody there waits for long."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from services.cli.metrics_compat import with_counterparts

# Between two pauses. Who else has work on the event loop goes through it several times, and comes through a pause.
_SLICE_SECONDS = 0.0005
_PAUSE_SECONDS = 0.001
_SAMPLES_AT_ONCE = 50


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
        yield generate_latest(_Part(metric, 0))
        for start in range(_SAMPLES_AT_ONCE, len(metric.samples), _SAMPLES_AT_ONCE):
            _help, _type, lines = generate_latest(_Part(metric, start)).split(b"\n", 2)
            yield lines


class _Part(Collector):
    """Some samples of a metric."""

    def __init__(self, metric: Metric, start: int) -> None:
        self._part = Metric(metric.name, metric.documentation, metric.type)
        self._part.samples = metric.samples[start : start + _SAMPLES_AT_ONCE]

    def collect(self) -> Iterable[Metric]:
        return (self._part,)
