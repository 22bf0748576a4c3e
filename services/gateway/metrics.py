"""What the gateway shows to Prometheus: how long clients wait, and how their requests end.

The names, labels and buckets are vLLM's, under the prefix `quire_`; finer buckets stand between them where a single
stream on a fast GPU falls.
"""

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.gateway.observer import Ending, GatewayObserver, RequestObserver

_LABELS = ("model_name", "engine")
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_CANCEL_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_END_TO_END_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class GatewayMetrics(GatewayObserver):
    """Counts what clients see, by model and engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._first_token = self._histogram(
            "quire_time_to_first_token_seconds", "Seconds from a request to its first token.", _FIRST_TOKEN_SECONDS
        )
        self._inter_token = self._histogram(
            "quire_inter_token_latency_seconds",
            "Seconds between two tokens of a request; those that came together share the time.",
            _INTER_TOKEN_SECONDS,
        )
        self._end_to_end = self._histogram(
            "quire_e2e_request_latency_seconds",
            "Seconds from a request to its last token, of requests that were finished.",
            _END_TO_END_SECONDS,
        )
        self._ended = self._counter(
            "quire_request_success",
            "Requests that ended, by reason: stop and length were finished, abort was left by its client.",
            (*_LABELS, "finished_reason"),
        )
        self._routed = self._counter(
            "quire_routed_requests",
            "Requests given to an engine, by what decided: only (no other is there), prefix, load (another one has more"
            " of the prompt, but too much to do), new (none has any), least-loaded, round-robin.",
            (*_LABELS, "reason"),
        )
        self._expected = self._counter(
            "quire_routed_cached_tokens",
            "Prompt tokens that the engine should have cached, when it was chosen.",
            _LABELS,
        )
        self._http_requests = self._counter(
            "quire_http_requests",
            "Requests over HTTP that were answered, by path, method and status; 499: the client left before.",
            ("route", "method", "status"),
        )
        self._failed_over = self._counter(
            "quire_failovers",
            "Requests that left the engine before they ended, by reason: lost, drained, no-kvmanager, refused.",
            (*_LABELS, "reason"),
        )
        self._cancelled = self._histogram(
            "quire_cancel_to_free_seconds",
            "Seconds from seeing that a client is gone to the engine's word that its request has ended.",
            _CANCEL_SECONDS,
        )
        self._refused = self._counter("quire_admission_rejections", "Requests that were not let in.", ("model_name",))
        self._deadlines = self._counter(
            "quire_deadline_exceeded",
            "Requests whose deadline passed, by phase: queued, no engine had begun them, or running.",
            ("model_name", "phase"),
        )
        self._slow_clients = self._counter(
            "quire_slow_clients", "Streams that were ended because their clients did not read them.", ("model_name",)
        )

    def refused(self, model_name: str) -> None:
        """Count it under its model."""
        self._refused.labels(model_name).inc()

    def deadline_passed(self, model_name: str, *, waiting: bool) -> None:
        """Count it under its model and phase."""
        self._deadlines.labels(model_name, "queued" if waiting else "running").inc()

    def slow_client(self, model_name: str) -> None:
        """Count it under its model."""
        self._slow_clients.labels(model_name).inc()

    def cancelled(self, model_name: str, engine_id: str, seconds: float) -> None:
        """Count how long it took."""
        self._cancelled.labels(model_name, engine_id).observe(seconds)

    def routed(self, model_name: str, engine_id: str, reason: str, cached_tokens: int) -> None:
        """Count the request, and what the engine should have of it."""
        self._routed.labels(model_name, engine_id, reason).inc()
        self._expected.labels(model_name, engine_id).inc(cached_tokens)

    def failed_over(self, model_name: str, engine_id: str, reason: str) -> None:
        """Count the loss under the engine that was left."""
        self._failed_over.labels(model_name, engine_id, reason).inc()

    def http_request(self, route: str, method: str, status: int) -> None:
        """Count an answer."""
        self._http_requests.labels(route, method, str(status)).inc()

    def request(self, model_name: str, engine_id: str) -> RequestObserver:
        """Count this request under its model and engine."""
        labels = (model_name, engine_id)
        return _RequestMetrics(
            self._first_token.labels(*labels),
            self._inter_token.labels(*labels),
            self._end_to_end.labels(*labels),
            {ending: self._ended.labels(*labels, ending.value) for ending in Ending},
        )

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, meaning, _LABELS, buckets=buckets, registry=self.registry)


class _RequestMetrics(RequestObserver):
    def __init__(
        self, first_token: Histogram, inter_token: Histogram, end_to_end: Histogram, ended: dict[Ending, Counter]
    ) -> None:
        self._first_token = first_token
        self._inter_token = inter_token
        self._end_to_end = end_to_end
        self._ended = ended

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        for _ in range(count):
            self._inter_token.observe(seconds / count)

    def ended(self, ending: Ending, seconds: float) -> None:
        self._ended[ending].inc()
        if ending in (Ending.STOP, Ending.LENGTH):
            self._end_to_end.observe(seconds)
