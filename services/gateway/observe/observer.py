"""What observers of the gateway receive. They only observe: nothing that they do or raise changes a request."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.v1 import gateway_pb2
from services.gateway.access.callers import Origin
from services.gateway.fleet.observer import FleetObserver
from services.runtime.errors import RejectionReason
from services.runtime.tracing.spans import NO_SPAN, Span


@dataclass(frozen=True)
class RequestInfo:
    """A request as it arrives, before anything of it is checked.

    `model_name` is empty unless such a model is served: what clients make up is no label. `arrival` is in seconds of
    the event loop's clock.
    """

    request_id: str
    model_name: str
    origin: Origin
    arrival: float
    span: Span = field(default=NO_SPAN, compare=False)


@dataclass(eq=False)
class RequestProgress:
    """How far a request has come. Its generation writes the tokens, its attempts the first three; others read."""

    prompt_tokens: int
    engine_id: str = ""  # of the latest engine
    attempts: int = 0  # submissions that an engine was sent
    failovers: int = 0
    started: bool = False
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0  # known at the end
    first_token_at: float | None = None

    def used_tokens(self) -> int:
        """Return the tokens used so far, prompt and answers together."""
        return (self.prompt_tokens if self.started else 0) + self.generated_tokens


class RequestObserver:
    """Receives what happens to one request, in this order; these defaults ignore it. `now` is in seconds."""

    def on_admitted(self, request_id: str) -> None:
        """It has its id and its place."""

    def on_prepared(self, progress: RequestProgress) -> None:
        """It is tokenized, and about to be given to an engine. The progress goes on changing."""

    def on_submitted(self, progress: RequestProgress) -> None:
        """An engine was given it, for the first time."""

    def on_started(self, started: gateway_pb2.Started) -> None:
        """An engine has begun it."""

    def on_tokens(self, delta: gateway_pb2.Delta, now: float) -> None:
        """A sample got text, or tokens, or both."""

    def on_slow_client(self) -> None:
        """It is being ended because its client does not read."""

    def on_deadline_passed(self, *, waiting: bool) -> None:
        """It is being ended because its time is over; `waiting`: no engine had begun it."""

    def on_ended(self, finished: gateway_pb2.Finished, now: float) -> None:
        """It was answered to its end. This or `failed` is called once, and last."""

    def on_failed(self, error: BaseException, now: float) -> None:
        """It ended with this instead: a ServiceError, or because its client left."""


class Inventory(NamedTuple):
    """What there is: engines by model and id, models, and tenants that have limits."""

    engines: Collection[tuple[str, str]]
    models: Collection[str]
    tenants: Collection[str]


class TenantStats(NamedTuple):
    """One tenant's requests for one model. The kinds of tokens are computed, cached, generated and recomputed.

    `running_tokens` are those of prompts and answers of the requests that an engine has begun: what the tenant would
    hold of the pool if nothing of it were shared.
    """

    model_name: str
    tenant: str
    requests: int
    running: int
    running_tokens: int
    tokens: Mapping[str, int]


class GatewayObserver(FleetObserver):
    """Receives what happens to requests; these defaults ignore it."""

    def on_request(self, request: RequestInfo) -> RequestObserver:
        """A request has arrived; return what receives the rest."""
        del request
        return RequestObserver()

    def on_rejected(self, model_name: str, refusal: RejectionReason) -> None:
        """A call was refused before it was a request."""

    def on_inventory(self, inventory: Inventory, now: float) -> None:
        """These engines, models and tenants are there now. `now` is in seconds."""

    def on_tenants(self, figures: Callable[[], list[TenantStats]], rejections: Mapping[str, int]) -> None:
        """Where to look for what tenants use; `rejections` are requests at a tenant's limit, by tenant."""

    def on_http_request(self, route: str, method: str, status: int) -> None:
        """A request over HTTP was answered; 499: its client left before."""
