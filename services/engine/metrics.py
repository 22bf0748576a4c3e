"""What an engine shows to Prometheus: its queue, its tokens, its preemptions, and how long steps take.

The names and labels are vLLM's, under the prefix `quire_`, where vLLM has the metric.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.engine.observer import EngineFigures, EngineObserver

_LABELS = ("model_name", "engine")
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

_GAUGES: tuple[tuple[str, str, Callable[[EngineFigures], float]], ...] = (
    ("quire_num_requests_running", "Requests that hold blocks.", lambda figures: figures.running),
    ("quire_num_requests_waiting", "Requests that wait for blocks.", lambda figures: figures.waiting),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineFigures], float]], ...] = (
    ("quire_prompt_tokens", "Prompt tokens of requests that were begun.", lambda figures: figures.totals.prompt_tokens),
    (
        "quire_prompt_tokens_cached",
        "Prompt tokens that were found in the prefix cache when their request was begun.",
        lambda figures: figures.totals.cached_tokens,
    ),
    ("quire_generation_tokens", "Tokens generated.", lambda figures: figures.totals.generated_tokens),
    (
        "quire_num_preemptions",
        "Times that a running request lost its blocks to another.",
        lambda figures: figures.totals.preemptions,
    ),
    (
        "quire_num_sequences_planned",
        "Sequences that took part in a step, summed over steps.",
        lambda figures: figures.totals.planned,
    ),
    (
        "quire_num_sequences_left_out",
        "Running sequences that sat out a step because the KV manager's answer was not there, summed over steps.",
        lambda figures: figures.totals.left_out,
    ),
    (
        "quire_kv_sessions",
        "Times that the pool was attached to the KV manager: the first time, and after each broken stream.",
        lambda figures: figures.sessions,
    ),
    (
        "quire_recomputed_tokens",
        "Tokens computed once more after a preemption: its price.",
        lambda figures: figures.totals.recomputed_tokens,
    ),
    (
        "quire_swapped_tokens",
        "Computed tokens that preemptions moved to host memory, instead of computing them again.",
        lambda figures: figures.totals.swapped_tokens,
    ),
)


class EngineMetrics(EngineObserver, Collector):
    """Looks at the engine whenever it is scraped, and keeps a histogram of its steps."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._figures: Callable[[], EngineFigures] | None = None
        self._labels = ("", "")
        self._step_seconds = Histogram(
            "quire_step_seconds",
            "Seconds that the model and the sampling of one step take.",
            _LABELS,
            buckets=_STEP_SECONDS,
            registry=self.registry,
        )
        self.registry.register(self)

    def began(self, model_name: str, engine_id: str, figures: Callable[[], EngineFigures]) -> None:
        """Show the engine from now on."""
        self._labels, self._figures = (model_name, engine_id), figures
        self._step_seconds.labels(*self._labels)

    def stepped(self, seconds: float) -> None:
        """Count a step."""
        self._step_seconds.labels(*self._labels).observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Look at the engine; before the model is loaded there are no series."""
        figures = self._figures() if self._figures else None
        for name, meaning, value in _GAUGES:
            yield self._filled(GaugeMetricFamily(name, meaning, labels=_LABELS), figures, value)
        for name, meaning, value in _COUNTERS:
            yield self._filled(CounterMetricFamily(name, meaning, labels=_LABELS), figures, value)

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` gives."""
        return self.collect()

    def _filled(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        figures: EngineFigures | None,
        value: Callable[[EngineFigures], float],
    ) -> Metric:
        if figures is not None:
            family.add_metric(self._labels, value(figures))
        return family
