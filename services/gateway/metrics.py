"""What the gateway shows to Prometheus: how long clients wait, what they ask for, and how their requests end.

The names, labels and buckets are vLLM's, under the prefix `quire_`; finer buckets stand between them where a single
stream on a fast GPU falls.
"""

from collections.abc import Callable, Collection, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.gateway.access.tenant_metrics import TenantMetrics
from services.gateway.access.tenant_usage import TenantFigures
from services.gateway.fleet.departures import MOST_ENGINES, SECONDS, Departures
from services.gateway.observer import Ending, FinishedRequest, GatewayObserver, RequestObserver
from services.runtime.errors import RejectionReason
from services.runtime.metrics.histograms import Buckets, Histogram

_LABELS = ("model_name", "engine")
_NO_MODEL = ""  # what was refused before any model was known
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_CANCEL_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_REQUEST_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5),
    *(5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# vLLM's end with the model's context; here one gateway may serve several models.
_TOKENS = (*(first * 10**power for power in range(6) for first in (1, 2, 5)), 1_000_000)
_SAMPLES = (1, 2, 5, 10, 20)

# What each request adds a value to: name, meaning, buckets.
_OF_REQUESTS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "first_token": (
        "quire_time_to_first_token_seconds",
        "Seconds from a request to its first token.",
        _FIRST_TOKEN_SECONDS,
    ),
    "inter_token": (
        "quire_inter_token_latency_seconds",
        "Seconds between two tokens of a request; those that came together share the time.",
        _INTER_TOKEN_SECONDS,
    ),
    "end_to_end": (
        "quire_e2e_request_latency_seconds",
        "Seconds from a request to its last token, of requests that were finished.",
        _REQUEST_SECONDS,
    ),
    "queued": (
        "quire_request_queue_time_seconds",
        "Seconds that a finished request waited for blocks at its engine.",
        _REQUEST_SECONDS,
    ),
    "prefill": (
        "quire_request_prefill_time_seconds",
        "Seconds from a finished request's first step to its first token.",
        _REQUEST_SECONDS,
    ),
    "decode": (
        "quire_request_decode_time_seconds",
        "Seconds from a finished request's first token to its last.",
        _REQUEST_SECONDS,
    ),
    "inference": (
        "quire_request_inference_time_seconds",
        "Seconds from a finished request's first step to its last token.",
        _REQUEST_SECONDS,
    ),
    "per_token": (
        "quire_request_time_per_output_token_seconds",
        "Mean seconds between the tokens of a finished request, of those with more than one.",
        _INTER_TOKEN_SECONDS,
    ),
    "prompt_tokens": ("quire_request_prompt_tokens", "Prompt tokens of finished requests.", _TOKENS),
    "generated_tokens": (
        "quire_request_generation_tokens",
        "Tokens generated for finished requests, of all samples.",
        _TOKENS,
    ),
    "longest_sample": (
        "quire_request_max_num_generation_tokens",
        "Tokens of the longest sample of finished requests.",
        _TOKENS,
    ),
    "max_tokens": (
        "quire_request_params_max_tokens",
        "max_tokens of finished requests, or what was set in its place.",
        _TOKENS,
    ),
    "samples": ("quire_request_params_n", "Samples that finished requests asked for.", _SAMPLES),
    "computed_tokens": (
        "quire_request_prefill_kv_computed_tokens",
        "Prompt tokens of finished requests that were not found in the prefix cache.",
        _TOKENS,
    ),
}


class GatewayMetrics(GatewayObserver):
    """Counts what clients see, by model and engine."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._of_requests = {key: self._histogram(*how) for key, how in _OF_REQUESTS.items()}
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
        self._isolated = self._counter(
            "quire_isolated_attempts",
            "Requests given to the engine to be computed with no other in their batch: two were lost with them before.",
            _LABELS,
        )
        self._given_up = self._counter(
            "quire_requests_given_up",
            "Requests that failed because engines were lost with them, the last one while they were isolated.",
            ("model_name",),
        )
        self._cancelled = self._histogram(
            "quire_cancel_to_free_seconds",
            "Seconds from seeing that a client is gone to the engine's word that its request has ended.",
            _CANCEL_SECONDS,
        )
        self._tenants = TenantMetrics()
        self.registry.register(self._tenants)
        self._refused = self._counter(
            "quire_admission_rejections",
            "Requests that were not let in, by reason.",
            ("model_name", "reason"),
        )
        self._open_streams = Gauge(
            "quire_open_streams",
            "Requests that were let in and have not ended, by what they came over: grpc, http.",
            ("model_name", "protocol"),
            registry=self.registry,
        )
        self._deadlines = self._counter(
            "quire_deadline_exceeded",
            "Requests whose deadline passed, by phase: queued, no engine had begun them, or running.",
            ("model_name", "phase"),
        )
        self._slow_clients = self._counter(
            "quire_slow_clients", "Streams that were ended because their clients did not read them.", ("model_name",)
        )
        self._requests: dict[tuple[str, str], _RequestMetrics] = {}
        self._engines: set[tuple[str, str]] = set()  # that have series,
        self._models: set[str] = set()  # and models
        self._departures = Departures[tuple[str, str]](SECONDS, most=MOST_ENGINES)

    def tenants(self, figures: Callable[[], list[TenantFigures]], rejections: Mapping[str, int]) -> None:
        """Look at the tenants' requests there."""
        self._tenants.begin(figures, rejections)

    def refused(self, model_name: str, refusal: RejectionReason) -> None:
        """Count it under its model and reason."""
        self._models.add(model_name)
        self._refused.labels(model_name, refusal.value).inc()

    def stream_opened(self, model_name: str, protocol: str) -> None:
        """Count one more."""
        self._models.add(model_name)
        self._open_streams.labels(model_name, protocol).inc()

    def stream_closed(self, model_name: str, protocol: str) -> None:
        """Count one less."""
        self._open_streams.labels(model_name, protocol).dec()

    def deadline_passed(self, model_name: str, *, waiting: bool) -> None:
        """Count it under its model and phase."""
        self._deadlines.labels(model_name, "queued" if waiting else "running").inc()

    def slow_client(self, model_name: str) -> None:
        """Count it under its model."""
        self._slow_clients.labels(model_name).inc()

    def cancelled(self, model_name: str, engine_id: str, seconds: float) -> None:
        """Count how long it took."""
        self._cancelled.of(*self._known(model_name, engine_id)).observe(seconds)

    def routed(self, model_name: str, engine_id: str, reason: str, cached_tokens: int) -> None:
        """Count the request, and what the engine should have of it."""
        labels = self._known(model_name, engine_id)
        self._routed.labels(*labels, reason).inc()
        self._expected.labels(*labels).inc(cached_tokens)

    def failed_over(self, model_name: str, engine_id: str, reason: str) -> None:
        """Count the loss under the engine that was left."""
        self._failed_over.labels(*self._known(model_name, engine_id), reason).inc()

    def isolated(self, model_name: str, engine_id: str) -> None:
        """Count the attempt under the engine that gets it."""
        self._isolated.labels(*self._known(model_name, engine_id)).inc()

    def given_up(self, model_name: str) -> None:
        """Count it under its model."""
        self._models.add(model_name)
        self._given_up.labels(model_name).inc()

    def http_request(self, route: str, method: str, status: int) -> None:
        """Count an answer."""
        self._http_requests.labels(route, method, str(status)).inc()

    def request(self, model_name: str, engine_id: str) -> RequestObserver:
        """Count this request under its model and engine."""
        labels = self._known(model_name, engine_id)
        if labels not in self._requests:
            self._models.add(model_name)
            for refusal in RejectionReason:
                self._refused.labels(model_name, refusal.value)  # from 0 on, so that the first shows in a rate
            self._given_up.labels(model_name)
            self._requests[labels] = _RequestMetrics(
                {key: histogram.of(*labels) for key, histogram in self._of_requests.items()},
                {ending: self._ended.labels(*labels, ending.value) for ending in Ending},
            )
        self._requests[labels].under_way += 1
        return self._requests[labels]

    def fleet(self, engines: Collection[tuple[str, str]], models: Collection[str], now: float) -> None:
        """Show engines that are gone, and have no requests any more, for a while; models until they are forgotten."""
        busy = {labels for labels, requests in self._requests.items() if requests.under_way}
        for labels in self._departures.due(self._engines, busy.union(engines), now):
            self._forget_engine(labels)
        for model in self._models.difference(models, [_NO_MODEL]):
            self._models.remove(model)
            for metric in (self._refused, self._open_streams, self._deadlines, self._slow_clients, self._given_up):
                metric.remove_by_labels({"model_name": model})

    def _known(self, model_name: str, engine_id: str) -> tuple[str, str]:
        """Return the labels of an engine that has series from now on."""
        labels = (model_name, engine_id)
        self._engines.add(labels)
        return labels

    def _forget_engine(self, labels: tuple[str, str]) -> None:
        self._engines.remove(labels)
        self._requests.pop(labels, None)
        for histogram in (*self._of_requests.values(), self._cancelled):
            histogram.remove(*labels)
        for counter in (self._ended, self._routed, self._expected, self._failed_over, self._isolated):
            counter.remove_by_labels(dict(zip(_LABELS, labels, strict=True)))

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(self.registry, name, meaning, _LABELS, bounds)


class _RequestMetrics(RequestObserver):
    """All requests of one model at one engine: of their own they have no state but that they are under way."""

    def __init__(self, of_requests: dict[str, Buckets], ended: dict[Ending, Counter]) -> None:
        self._of_requests = of_requests
        self._inter_token = of_requests["inter_token"]
        self._ended = ended
        self.under_way = 0

    def first_token(self, seconds: float) -> None:
        self._of_requests["first_token"].observe(seconds)

    def next_tokens(self, count: int, seconds: float) -> None:
        self._inter_token.observe(seconds / count, count)

    def finished(self, request: FinishedRequest) -> None:
        values: dict[str, float] = {
            "queued": request.queued,
            "prefill": request.prefill,
            "decode": request.decode,
            "inference": request.prefill + request.decode,
            "prompt_tokens": request.prompt_tokens,
            "generated_tokens": request.generated_tokens,
            "longest_sample": request.longest_sample,
            "max_tokens": request.max_tokens,
            "samples": request.samples,
            "computed_tokens": request.prompt_tokens - request.cached_tokens,
        }
        if request.longest_sample > 1:
            values["per_token"] = request.decode / (request.longest_sample - 1)
        for key, value in values.items():
            self._of_requests[key].observe(value)

    def ended(self, ending: Ending | None, seconds: float) -> None:
        self.under_way -= 1
        if ending is not None:
            self._ended[ending].inc()
        if ending in (Ending.STOP, Ending.LENGTH):
            self._of_requests["end_to_end"].observe(seconds)
