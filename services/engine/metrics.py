"""What an engine shows to Prometheus: its queue, its tokens, its preemptions, and where the time of steps goes.

The names and labels are vLLM's, under the prefix `quire_`, where vLLM has the metric.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.engine.observer import EngineFigures, EngineObserver, StepFigures
from services.runtime.metrics.histograms import Buckets, Histogram

_LABELS = ("model_name", "engine")
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# Phases but the forward pass take microseconds.
_PHASE_SECONDS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, *_STEP_SECONDS)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PHASES = ("plan", "wait", "forward", "sample", "publish")

_Values = dict[tuple[str, ...], float]

# Name, meaning, labels beside model_name and engine, and the values by those labels.
_GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[EngineFigures], _Values]], ...] = (
    ("quire_num_requests_running", "Requests that hold blocks.", (), lambda figures: {(): figures.running}),
    ("quire_num_requests_waiting", "Requests that wait for blocks.", (), lambda figures: {(): figures.waiting}),
    (
        "quire_num_requests_waiting_by_reason",
        "The same requests by what they wait for: capacity, or deferred, because another one computes what they begin"
        " with, or because the KV manager is away.",
        ("reason",),
        lambda figures: {("capacity",): figures.waiting - figures.deferred, ("deferred",): figures.deferred},
    ),
)
_COUNTERS: tuple[tuple[str, str, tuple[str, ...], Callable[[EngineFigures], _Values]], ...] = (
    (
        "quire_prompt_tokens",
        "Prompt tokens of requests that were begun.",
        (),
        lambda figures: {(): figures.totals.prompt_tokens},
    ),
    (
        "quire_prompt_tokens_cached",
        "Prompt tokens that were found in the prefix cache when their request was begun.",
        (),
        lambda figures: {(): figures.totals.cached_tokens},
    ),
    (
        "quire_prompt_tokens_by_source",
        "Prompt tokens of requests that were begun, by where they come from.",
        ("source",),
        lambda figures: {
            ("local_compute",): figures.totals.prompt_tokens - figures.totals.cached_tokens,
            ("local_cache_hit",): figures.totals.cached_tokens,
        },
    ),
    ("quire_generation_tokens", "Tokens generated.", (), lambda figures: {(): figures.totals.generated_tokens}),
    (
        "quire_num_preemptions",
        "Times that a running request lost its blocks to another.",
        (),
        lambda figures: {(): figures.totals.preemptions},
    ),
    (
        "quire_num_requests_failed",
        "Requests that failed after they were taken, by reason: step, block_manager, deadline, deadline_queued,"
        " constraint, or request, which is what was raised for one request alone.",
        ("reason",),
        lambda figures: {(one.name.lower(),): count for one, count in figures.totals.failures.items()},
    ),
    (
        "quire_num_sequences_planned",
        "Sequences that took part in a step, summed over steps.",
        (),
        lambda figures: {(): figures.totals.planned},
    ),
    (
        "quire_num_sequences_left_out",
        "Running sequences that sat out a step because the KV manager's answer was not there, summed over steps.",
        (),
        lambda figures: {(): figures.totals.left_out},
    ),
    (
        "quire_kv_sessions",
        "Times that the pool was attached to the KV manager: the first time, and after each broken stream.",
        (),
        lambda figures: {(): figures.sessions},
    ),
    (
        "quire_recomputed_tokens",
        "Tokens computed once more after a preemption: its price.",
        (),
        lambda figures: {(): figures.totals.recomputed_tokens},
    ),
    (
        "quire_swapped_tokens",
        "Computed tokens that preemptions moved to host memory, instead of computing them again.",
        (),
        lambda figures: {(): figures.totals.swapped_tokens},
    ),
)


class EngineMetrics(EngineObserver, Collector):
    """Looks at the engine whenever it is scraped, and keeps histograms of its steps."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._figures: Callable[[], EngineFigures] | None = None
        self._labels = ("", "")
        self._step_seconds = self._histogram(
            "quire_step_seconds", "Seconds that the model and the sampling of one step take.", (), _STEP_SECONDS
        )
        self._phase_seconds = self._histogram(
            "quire_step_phase_seconds",
            "Seconds of one step by phase: plan, wait (for the KV manager), forward, sample, publish.",
            ("phase",),
            _PHASE_SECONDS,
        )
        self._iteration_tokens = self._histogram(
            "quire_iteration_tokens_total", "Tokens that one step computes.", (), _ITERATION_TOKENS
        )
        self._step: Buckets | None = None
        self._tokens: Buckets | None = None
        self._phases: tuple[Buckets, ...] = ()
        self.registry.register(self)

    def began(self, model_name: str, engine_id: str, figures: Callable[[], EngineFigures]) -> None:
        """Show the engine from now on."""
        self._labels = labels = (model_name, engine_id)
        self._step, self._tokens = self._step_seconds.labels(*labels), self._iteration_tokens.labels(*labels)
        self._phases = tuple(self._phase_seconds.labels(*labels, phase) for phase in PHASES)
        self._figures = figures

    def on_step(self, step: StepFigures) -> None:
        """Count a step."""
        assert self._step is not None, "an engine begins before it steps"
        assert self._tokens is not None, "with all of its series"
        self._step.observe(step.seconds)
        if step.tokens:
            self._tokens.observe(step.tokens)
        times = (step.plan, step.wait, step.forward, step.sample, step.publish)
        for phase, seconds in zip(self._phases, times, strict=True):
            phase.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Look at the engine; before the model is loaded there are no series."""
        figures = self._figures() if self._figures else None
        for name, meaning, labels, values in _GAUGES:
            yield self._filled(GaugeMetricFamily(name, meaning, labels=(*_LABELS, *labels)), figures, values)
        for name, meaning, labels, values in _COUNTERS:
            yield self._filled(CounterMetricFamily(name, meaning, labels=(*_LABELS, *labels)), figures, values)

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` gives."""
        return self.collect()

    def _histogram(self, name: str, meaning: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Histogram:
        return Histogram(self.registry, name, meaning, (*_LABELS, *labels), bounds)

    def _filled(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        figures: EngineFigures | None,
        values: Callable[[EngineFigures], _Values],
    ) -> Metric:
        if figures is not None:
            for labels, value in values(figures).items():
                family.add_metric([*self._labels, *labels], value)
        return family
