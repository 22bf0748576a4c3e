"""Observers of the gateway. Nothing that an observer does or raises changes a request."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.fleet.observer import FleetObserver
from services.runtime.errors import RejectionReason
from services.runtime.tracing.spans import NO_SPAN, Span


@dataclass(frozen=True)
class RequestInfo:
    """A request at its arrival, before any check.

    `model_name` is empty for unknown models, so that clients cannot create labels. `arrival` is in seconds of the event
    loop's clock.
    """

    request_id: str
    model_name: str
    origin: Origin
    arrival: float
    span: Span = field(default=NO_SPAN, compare=False)


@dataclass(eq=False)
class RequestProgress:
    """The progress of a request. Attempts write the engine, attempts and failovers, Generation the rest."""

    prompt_tokens: int
    engine_id: str = ""  # of the latest engine
    attempts: int = 0  # submissions sent to engines
    failovers: int = 0
    started: bool = False
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0  # set at the end
    first_token_at: float | None = None

    def used_tokens(self) -> int:
        """Return the tokens used so far, prompt and samples together."""
        return (self.prompt_tokens if self.started else 0) + self.generated_tokens


class RequestObserver:
    """Receives the events of one request, in this order; these defaults ignore them. `now` is in seconds."""

    def on_admitted(self, request_id: str) -> None:
        """The request has passed all limits."""

    def on_prepared(self, progress: RequestProgress) -> None:
        """The request is tokenized and about to be submitted. `progress` keeps changing."""

    def on_submitted(self, progress: RequestProgress) -> None:
        """The request was submitted to its first engine."""

    def on_started(self, started: gateway_pb2.Started) -> None:
        """An engine has started the request."""

    def on_tokens(self, sample: int, count: int, now: float) -> None:
        """A sample has new text or tokens; `count` is the number of tokens."""

    def on_slow_client(self) -> None:
        """The request is being cancelled because its client does not read."""

    def on_deadline_exceeded(self, *, queued: bool) -> None:
        """The request is being cancelled at its deadline; `queued`: no engine had started it."""

    def on_ended(self, finished: gateway_pb2.Finished, now: float) -> None:
        """The request has finished. Either this or `on_failed` is the last event."""

    def on_failed(self, error: BaseException, now: float) -> None:
        """The request ended with a ServiceError, or with the cancellation by a disconnected client."""


class Inventory(NamedTuple):
    """The connected engines by model and id, the known models, and the tenants of the current keys.

    `usable` is the number of engines of each known model that accept requests.
    """

    engines: Collection[tuple[str, str]]
    models: Collection[str]
    tenants: Collection[str]
    usable: Mapping[str, int] = MappingProxyType({})


class TenantStats(NamedTuple):
    """One tenant's requests for one model; `tokens` by kind: computed, cached, generated, recomputed.

    `running_tokens` are the tokens of started requests in flight, prompts and samples: what they would hold of the pool
    without prefix sharing.
    """

    model_name: str
    tenant: str
    requests: int
    running: int
    running_tokens: int
    tokens: Mapping[str, int]


class GatewayObserver(FleetObserver):
    """Receives the events of all requests; these defaults ignore them."""

    def on_request(self, request: RequestInfo) -> RequestObserver:
        """A request has arrived; return the observer of its further events."""
        del request
        return RequestObserver()

    def on_rejected(self, model_name: str, reason: RejectionReason) -> None:
        """A call was rejected before it became a request."""

    def on_inventory(self, inventory: Inventory, now: float) -> None:
        """The current engines, models and tenants, reported every few seconds. `now` is in seconds."""

    def on_tenants(self, stats: Callable[[], list[TenantStats]], rejections: Mapping[str, int]) -> None:
        """The sources of tenants' metrics; `rejections` counts requests rejected at a tenant's limit, by tenant."""

    def on_parsed(self, model_name: str, dialect: str, calls: int, failures: Mapping[str, int]) -> None:
        """The output of a sample was parsed; `failures` counts what is no call, or no whole one, by kind."""

    def on_http_request(self, route: str, method: str, status: int) -> None:
        """An HTTP request was answered; 499: its client disconnected before."""
