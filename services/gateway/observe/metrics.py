"""The gateway's Prometheus metrics: latencies, sizes and ends of requests."""

import collections
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.fleet.engine_events import FailoverReason
from services.gateway.fleet.retention import MAX_RETAINED_ENGINES, RETENTION_SECONDS, Retention
from services.gateway.fleet.routing import RoutingReason
from services.gateway.observe.distributions import DISTRIBUTIONS, EngineSeries, FinishedReason
from services.gateway.observe.observer import (
    GatewayObserver,
    Inventory,
    RequestInfo,
    RequestObserver,
    RequestProgress,
    TenantStats,
)
from services.gateway.observe.tenant_metrics import TenantMetrics
from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidField,
    RejectionReason,
    ServiceError,
    SlowClient,
    Unavailable,
)
from services.runtime.metrics.histograms import Histogram
from services.wire.field_rules import field_paths

_LABELS = ("model_name", "engine")
_NO_MODEL = ""  # of calls rejected before their model was known
_CANCEL_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)

# Counters by model and engine: name, help text, labels.
_OF_ENGINES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "ended": (
        "quire_request_success",
        "Submitted requests that ended, by reason: stop, length, abort (client or deadline), error.",
        (*_LABELS, "finished_reason"),
    ),
    "routed": (
        "quire_routed_requests",
        "Requests sent to an engine, by reason: only (no other engine), prefix (longest cached prefix), load (longer"
        " cached prefix elsewhere, but too much load), new (no cached prefix), least-loaded, round-robin.",
        (*_LABELS, "reason"),
    ),
    "expected": (
        "quire_routed_cached_tokens",
        "Prompt tokens expected in the engine's prefix cache when it was chosen.",
        _LABELS,
    ),
    "failed_over": (
        "quire_failovers",
        "Requests taken from the engine before their end, by reason: lost, drained, no-kvmanager.",
        (*_LABELS, "reason"),
    ),
    "isolated": (
        "quire_isolated_attempts",
        "Requests sent to an engine to run alone in its batch, because two engines were lost while they computed them.",
        _LABELS,
    ),
}
# Counters by model.
_OF_MODELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "given_up": (
        "quire_requests_given_up",
        "Requests that failed because they took down several engines, the last one while they ran isolated.",
        ("model_name",),
    ),
    "rejected": (
        "quire_admission_rejections",
        "Rejected requests, by reason.",
        ("model_name", "reason"),
    ),
    "deadlines": (
        "quire_deadline_exceeded",
        "Requests whose deadline was exceeded, by phase: queued or running.",
        ("model_name", "phase"),
    ),
    "invalid": (
        "quire_invalid_requests",
        "Requests refused for a field, by its path in gRPC; other: a field without rules.",
        ("model_name", "field"),
    ),
    "calls": (
        "quire_tool_calls",
        "Calls of tools in answers over HTTP, by the dialect (form of calls) of the model.",
        ("model_name", "dialect"),
    ),
    "parse_failures": (
        "quire_tool_call_parse_failures",
        "HTTP answers with a broken tool call, by kind: no-call (a mark, but no call behind it), arguments (they are no"
        " JSON object), cut (the answer ended within the call).",
        ("model_name", "dialect", "kind"),
    ),
    "slow_clients": (
        "quire_slow_clients",
        "Streams cancelled because their clients did not read them.",
        ("model_name",),
    ),
}

# The values of further labels of events that may come late or never.
_RARE_OF_MODELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "rejected": tuple((reason.value,) for reason in RejectionReason),
    "given_up": ((),),
    "deadlines": (("queued",), ("running",)),
    "slow_clients": ((),),
}
_RARE_OF_ENGINES: dict[str, tuple[tuple[str, ...], ...]] = {
    "failed_over": tuple((reason.value,) for reason in FailoverReason if reason is not FailoverReason.REFUSED),
    "isolated": ((),),
    "expected": ((),),
    "routed": tuple((reason.value,) for reason in RoutingReason),
}
_PROTOCOLS = ("grpc", "http")
_FIELDS = {path.text for path in field_paths(gateway_pb2.GenerateRequest.DESCRIPTOR)}


class GatewayMetrics(GatewayObserver):
    """Counts and times requests by model and engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._distributions = {key: self._histogram(*how) for key, how in DISTRIBUTIONS.items()}
        self._of_engines = {key: Counter(*how, registry=self.registry) for key, how in _OF_ENGINES.items()}
        self._of_models = {key: Counter(*how, registry=self.registry) for key, how in _OF_MODELS.items()}
        self._http_requests = Counter(
            "quire_http_requests",
            "Answered HTTP requests, by path, method and status; 499: the client disconnected before the answer.",
            ("route", "method", "status"),
            registry=self.registry,
        )
        self._cancelled = self._histogram(
            "quire_cancel_to_free_seconds",
            "Seconds from releasing a request to the engine's report of its end.",
            _CANCEL_SECONDS,
        )
        self._open_streams = Gauge(
            "quire_open_streams",
            "Requests in flight, by protocol: grpc, http.",
            ("model_name", "protocol"),
            registry=self.registry,
        )
        self._usable_engines = Gauge(
            "quire_usable_engines",
            "Engines that accept requests, of each model that this gateway has seen.",
            ("model_name",),
            registry=self.registry,
        )
        self._tenants = TenantMetrics()
        self.registry.register(self._tenants)
        self._series: dict[tuple[str, str], EngineSeries] = {}
        self._engines: set[tuple[str, str]] = set()  # engines with series
        self._models: set[str] = set()  # models with series
        self._counted_models: set[str] = set()  # models whose usable engines are counted
        self._retention = Retention[tuple[str, str]](RETENTION_SECONDS, max_absent=MAX_RETAINED_ENGINES)

    def on_tenants(self, stats: Callable[[], list[TenantStats]], rejections: Mapping[str, int]) -> None:
        """Export these with the tenants' metrics."""
        self._tenants.set_sources(stats, rejections)

    def on_request(self, request: RequestInfo) -> RequestObserver:
        """Return the observer that counts this request."""
        return _RequestMetrics(self, request)

    def on_rejected(self, model_name: str, reason: RejectionReason) -> None:
        """Count the rejection by model and reason."""
        self.count("rejected", model_name, reason.value)

    def count(self, key: str, model_name: str, *labels: str) -> None:
        """Increment a counter of a model; `labels` are its other labels."""
        self._models.add(model_name)
        self._of_models[key].labels(model_name, *labels).inc()

    def count_stream(self, request: RequestInfo, change: int) -> None:
        """Add `change`, 1 or -1, to the requests in flight."""
        self._models.add(request.model_name)
        self._open_streams.labels(request.model_name, request.origin.protocol).inc(change)

    def on_cancelled(self, model_name: str, engine_id: str, seconds: float) -> None:
        """Record the seconds."""
        self._cancelled.labels(*self._engine_labels(model_name, engine_id)).observe(seconds)

    def on_routed(self, model_name: str, engine_id: str, reason: str, cached_tokens: int) -> None:
        """Count the request and its expected cached tokens."""
        labels = self._engine_labels(model_name, engine_id)
        self._of_engines["routed"].labels(*labels, reason).inc()
        self._of_engines["expected"].labels(*labels).inc(cached_tokens)

    def on_failover(self, model_name: str, engine_id: str, reason: str) -> None:
        """Count the failover under the previous engine."""
        self._of_engines["failed_over"].labels(*self._engine_labels(model_name, engine_id), reason).inc()

    def on_isolated(self, model_name: str, engine_id: str) -> None:
        """Count the isolated attempt."""
        self._of_engines["isolated"].labels(*self._engine_labels(model_name, engine_id)).inc()

    def on_given_up(self, model_name: str) -> None:
        """Count the request."""
        self.count("given_up", model_name)

    def on_parsed(self, model_name: str, dialect: str, calls: int, failures: Mapping[str, int]) -> None:
        """Count calls and failures."""
        self._models.add(model_name)
        self._of_models["calls"].labels(model_name, dialect).inc(calls)
        for kind, count in failures.items():
            self._of_models["parse_failures"].labels(model_name, dialect, kind).inc(count)

    def on_http_request(self, route: str, method: str, status: int) -> None:
        """Count the answer."""
        self._http_requests.labels(route, method, str(status)).inc()

    def series(self, model_name: str, engine_id: str) -> EngineSeries:
        """Return the series for requests of this model whose first engine is this one."""
        labels = self._engine_labels(model_name, engine_id)
        if labels not in self._series:
            self._start_at_zero(*labels)
            self._series[labels] = EngineSeries(
                {key: histogram.labels(*labels) for key, histogram in self._distributions.items()},
                {reason: self._of_engines["ended"].labels(*labels, reason.value) for reason in FinishedReason},
            )
        return self._series[labels]

    def on_inventory(self, inventory: Inventory, now: float) -> None:
        """Drop series of disconnected engines without requests after their retention, and of unknown models at once."""
        self._count_usable_engines(inventory.usable)
        busy = {labels for labels, series in self._series.items() if series.in_flight}
        for labels in self._retention.expired(self._engines, busy.union(inventory.engines), now):
            self._remove_engine(labels)
        for model in self._models.difference(inventory.models, [_NO_MODEL]):
            self._models.remove(model)
            for metric in (*self._of_models.values(), self._open_streams):
                metric.remove_by_labels({"model_name": model})

    def _count_usable_engines(self, usable: Mapping[str, int]) -> None:
        for model in self._counted_models.difference(usable):
            self._usable_engines.remove(model)
        self._counted_models = set(usable)
        for model, count in usable.items():
            self._usable_engines.labels(model).set(count)

    def _start_at_zero(self, model_name: str, engine_id: str) -> None:
        """Create the series of rare events, so that rate() includes the first, and their number stays the same."""
        self._models.add(model_name)
        for key, label_values in _RARE_OF_MODELS.items():
            for value in label_values:
                self._of_models[key].labels(model_name, *value)
        for key, label_values in _RARE_OF_ENGINES.items():
            for value in label_values:
                self._of_engines[key].labels(model_name, engine_id, *value)
        for protocol in _PROTOCOLS:
            self._open_streams.labels(model_name, protocol)
        self._cancelled.labels(model_name, engine_id)

    def _engine_labels(self, model_name: str, engine_id: str) -> tuple[str, str]:
        """Return the labels of an engine, and record that it has series."""
        labels = (model_name, engine_id)
        self._engines.add(labels)
        return labels

    def _remove_engine(self, labels: tuple[str, str]) -> None:
        self._engines.remove(labels)
        self._series.pop(labels, None)
        for histogram in (*self._distributions.values(), self._cancelled):
            histogram.remove(*labels)
        for counter in self._of_engines.values():
            counter.remove_by_labels(dict(zip(_LABELS, labels, strict=True)))

    def _histogram(self, name: str, help_text: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(self.registry, name, help_text, _LABELS, bounds)


class _RequestMetrics(RequestObserver):
    """Counts and times one request."""

    def __init__(self, metrics: GatewayMetrics, request: RequestInfo) -> None:
        self._metrics = metrics
        self._request = request
        self._admitted = False
        self._series: EngineSeries | None = None
        self._max_tokens = 0
        self._lengths = collections.Counter[int]()  # tokens by sample
        self._last_tokens_at: float | None = None

    def on_admitted(self, request_id: str) -> None:
        del request_id
        self._admitted = True
        self._metrics.count_stream(self._request, 1)

    def on_submitted(self, progress: RequestProgress) -> None:
        self._series = self._metrics.series(self._request.model_name, progress.engine_id)
        self._series.in_flight += 1

    def on_started(self, started: gateway_pb2.Started) -> None:
        self._max_tokens = started.max_tokens

    def on_tokens(self, sample: int, count: int, now: float) -> None:
        last, series = self._last_tokens_at, self._series
        if not count or series is None:
            return
        self._lengths[sample] += count
        self._last_tokens_at = now
        inter_token = series.distributions["inter_token"]
        if last is not None:
            inter_token.observe((now - last) / count, count)
            return
        series.distributions["first_token"].observe(now - self._request.arrival)
        if count > 1:
            inter_token.observe(0.0, count - 1)

    def on_slow_client(self) -> None:
        self._metrics.count("slow_clients", self._request.model_name)

    def on_deadline_exceeded(self, *, queued: bool) -> None:
        self._metrics.count("deadlines", self._request.model_name, "queued" if queued else "running")

    def on_ended(self, finished: gateway_pb2.Finished, now: float) -> None:
        length = finished.samples[0].reason == decoding_pb2.FINISH_REASON_LENGTH
        if self._series is not None:
            for key, value in self._values(finished).items():
                self._series.distributions[key].observe(value)
            self._series.distributions["end_to_end"].observe(now - self._request.arrival)
        self._end(FinishedReason.LENGTH if length else FinishedReason.STOP)

    def on_failed(self, error: BaseException, now: float) -> None:
        del now
        if isinstance(error, ServiceError) and error.rejection is not None:
            self._metrics.on_rejected(self._request.model_name, error.rejection)
        if isinstance(error, InvalidField):
            field = error.field.partition("[")[0]
            self._metrics.count("invalid", self._request.model_name, field if field in _FIELDS else "other")
        self._end(_finished_reason(error))

    def _end(self, reason: FinishedReason | None) -> None:
        if self._admitted:
            self._metrics.count_stream(self._request, -1)
        if self._series is not None:
            self._series.in_flight -= 1
            if reason is not None:
                self._series.ended[reason].inc()

    def _values(self, finished: gateway_pb2.Finished) -> dict[str, float]:
        usage, timing = finished.usage, finished.timing
        longest = max(self._lengths.values(), default=0)
        prefill, decode = (one.ToTimedelta().total_seconds() for one in (timing.prefill, timing.decode))
        values: dict[str, float] = {
            "queued": timing.queued.ToTimedelta().total_seconds(),
            "prefill": prefill,
            "decode": decode,
            "inference": prefill + decode,
            "prompt_tokens": usage.prompt_tokens,
            "generated_tokens": usage.generated_tokens,
            "longest_sample": longest,
            "max_tokens": self._max_tokens,
            "samples": len(finished.samples),
            "computed_tokens": usage.prompt_tokens - usage.cached_tokens,
        }
        return values | ({"per_token": decode / (longest - 1)} if longest > 1 else {})


def _finished_reason(error: BaseException) -> FinishedReason | None:
    if isinstance(error, Unavailable | GenerationFailed):
        return FinishedReason.ERROR
    if isinstance(error, ServiceError) and not isinstance(error, DeadlineExceeded | SlowClient):
        return None
    return FinishedReason.ABORT
