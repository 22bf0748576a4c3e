"""What can be heard of the gateway's requests, by whoever measures them."""

from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from services.runtime.errors import RejectionReason

if TYPE_CHECKING:
    from services.gateway.access.tenant_usage import TenantFigures


class Ending(Enum):
    """How a request ended that an engine had taken; the values are those of vLLM's label `finished_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class FinishedRequest(NamedTuple):
    """A request that came to its end, whichever engines worked on it.

    Seconds are the last engine's: waiting for blocks, from there to its first token, and from there to its last.
    `generated_tokens` are of all samples, `longest_sample` those of one. `max_tokens` holds for each.
    """

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    longest_sample: int
    samples: int
    max_tokens: int
    queued: float
    prefill: float
    decode: float


class RequestObserver:
    """Hears of one request. This one does nothing with it."""

    def first_token(self, seconds: float) -> None:
        """The first token came so many seconds after the request."""

    def next_tokens(self, count: int, seconds: float) -> None:
        """So many tokens came together, so many seconds after those before them."""

    def finished(self, request: FinishedRequest) -> None:
        """The request was finished. That it ended is told next."""

    def ended(self, ending: Ending | None, seconds: float) -> None:
        """The request ended so many seconds after it came; None: it was refused before an engine took it.

        This is called once, and last.
        """


class GatewayObserver:
    """Hears of requests. This one does nothing with it."""

    def request(self, model_name: str, engine_id: str) -> RequestObserver:
        """A request for this model was given to this engine; return who hears the rest."""
        del model_name, engine_id
        return RequestObserver()

    def routed(self, model_name: str, engine_id: str, reason: str, cached_tokens: int) -> None:
        """A request was given to this engine, which should have so many of the prompt's tokens."""

    def failed_over(self, model_name: str, engine_id: str, reason: str) -> None:
        """A request left this engine before it had ended, for another one to go on with it."""

    def isolated(self, model_name: str, engine_id: str) -> None:
        """A request with which engines were lost was given to this one, to be computed with no other in its batch."""

    def given_up(self, model_name: str) -> None:
        """Engines were lost with a request for this model, one of them while it was isolated; it has failed."""

    def refused(self, model_name: str, refusal: RejectionReason) -> None:
        """A request for this model was not let in; the name is empty where no such model is known."""

    def stream_opened(self, model_name: str, protocol: str) -> None:
        """A request for this model was let in, over grpc or http."""

    def stream_closed(self, model_name: str, protocol: str) -> None:
        """A request that was let in has ended, however it did."""

    def deadline_passed(self, model_name: str, *, waiting: bool) -> None:
        """The deadline of a request for this model passed, before an engine had begun it or while it ran."""

    def slow_client(self, model_name: str) -> None:
        """A stream of this model was ended because its client did not read it."""

    def cancelled(self, model_name: str, engine_id: str, seconds: float) -> None:
        """The engine has said that a request has ended, so many seconds after its client had left it."""

    def fleet(self, engines: Collection[tuple[str, str]], models: Collection[str], now: float) -> None:
        """These engines are there, by model and id, and these models are known. `now` is in seconds."""

    def tenants(self, figures: "Callable[[], list[TenantFigures]]", rejections: Mapping[str, int]) -> None:
        """What tenants use can be looked at there; `rejections` are requests at a tenant's limit, by tenant."""

    def http_request(self, route: str, method: str, status: int) -> None:
        """A request over HTTP was answered; 499: its client left before."""
