"""Handles clients' requests: checks, tokenizes and admits them, and runs their generations."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass, replace

from quire.v1 import gateway_pb2
from services.gateway.access.admission import AdmissionControl, AdmissionSlot
from services.gateway.access.callers import ANONYMOUS, DEFAULT_ORIGIN, Caller, Origin
from services.gateway.access.namespace import Namespace, qualified
from services.gateway.access.slow_clients import ClientStream, SlowClients
from services.gateway.access.tenants import Tenants
from services.gateway.access.token_bound import Sequences, sequences_of, token_upper_bound
from services.gateway.attempts import FailoverLimits, RequestAttempts
from services.gateway.deadlines import Deadline
from services.gateway.dialects.parser import DialectParser
from services.gateway.fleet.dispatch import Dispatcher
from services.gateway.fleet.fleet import Fleet, ServedModel
from services.gateway.fleet.load_estimate import CurrentLoad
from services.gateway.generation import Generation, Writer
from services.gateway.observe.observer import GatewayObserver, Inventory, RequestInfo, RequestObserver
from services.gateway.prepared_request import AdmittedRequest, Preparation, PreparedRequest
from services.gateway.request_checks import (
    check_fits,
    check_ids,
    check_vocabulary,
    checked,
    fill_defaults,
    timeout_of,
)
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidField, Overloaded, RejectionReason, RequestExists, ServiceError, Unavailable
from services.runtime.tracing.spans import Tracing

# Closing the server cancels calls that it has not accepted yet, and clients do not retry cancelled calls. So drain()
# first gives clients that watch its health, and load balancers, time to stop sending.
_QUIET_SECONDS = 0.5
_MAX_NOTICE_SECONDS = 5.0

Responses = AsyncGenerator[gateway_pb2.GenerateResponse, None]


@dataclass(frozen=True)
class RequestLimits:
    """The limits on all requests: admission, tenants, failover, slow clients."""

    admission: AdmissionControl
    failover: FailoverLimits
    tenants: Tenants
    slow_clients: SlowClients


class RequestHandler:
    """Takes requests from all servers. `clock` is the event loop's, in seconds."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        limits: RequestLimits,
        namespace: Namespace,
        observer: GatewayObserver,
        tracing: Tracing,
        clock: Callable[[], float],
    ) -> None:
        """`observer` must not raise: wrap it in GatewayObservers."""
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._limits = limits
        self._preparation = Preparation(namespace)
        self._observer = observer
        self._tracing = tracing
        self._clock = clock
        self._live_ids: set[str] = set()
        self._draining = False
        self._last_rejected_at = 0.0
        self._idle = asyncio.Event()
        self._idle.set()

    def on_parsed(self, model_name: str, parser: DialectParser) -> None:
        """Count the calls of a sample, and what is none, for the metrics."""
        failures = {kind.value: count for kind, count in parser.failures.items()}
        if parser.calls or failures:
            self._observer.on_parsed(model_name, parser.calls_name, parser.calls, failures)

    async def generate(
        self,
        request: gateway_pb2.GenerateRequest,
        origin: Origin = DEFAULT_ORIGIN,
        *,
        caps_output: bool = False,
        writer: Writer | None = None,
    ) -> Responses:
        """Yield the responses. Raises a ServiceError. `caps_output` makes max_tokens at most what fits.

        What `writer` can write at once is not yielded: tokens that arrive while the caller waits for a response.

        One stack owns the request's resources and releases them in reverse order. Observers own none; their last
        event comes after the release.
        """
        info = self._info(request, origin)
        observer, finished = self._observer.on_request(info), None
        try:
            async with AsyncExitStack() as resources:
                admitted = replace(self._admit(resources, request, info, observer), caps_output=caps_output)
                observer.on_admitted(admitted.request.request_id)
                prepared = await self._preparation.prepare(request, info, admitted)
                observer.on_prepared(prepared.progress)
                admitted.reservation.resize(prepared.token_upper_bound(), prepared.progress.used_tokens)
                admitted.slot.set_tokens(prepared.token_upper_bound(), self._clock())
                responses, client = await self._submit(resources, prepared, observer, writer)
                observer.on_submitted(prepared.progress)
                async for response in responses:
                    match response.WhichOneof("event"):
                        case "delta":
                            observer.on_tokens(response.delta.sample, len(response.delta.token_ids), self._clock())
                        case "started":
                            admitted.slot.on_started(self._clock())
                            observer.on_started(response.started)
                        case "finished":
                            finished = response.finished
                    client.begin_write()
                    yield response
                    client.end_write()
        except BaseException as error:
            if finished is None:
                observer.on_failed(error, self._clock())
            raise
        finally:
            if finished is not None:
                observer.on_ended(finished, self._clock())

    def check(self, request: gateway_pb2.GenerateRequest) -> None:
        """Raise InvalidField if a field other than the prompt is invalid for its model."""
        vocabulary_size = self._fleet.model(request.model).description().vocabulary_size
        check_vocabulary(checked(request), vocabulary_size)

    def check_count(self, prompts: Sequence[gateway_pb2.GenerateRequest], origin: Origin) -> None:
        """Raise InvalidField if the prompts of one HTTP request exceed the limit of its tenant together."""
        count = sum(sequences_of(one).count for one in prompts)
        self._limits.tenants.check_count(origin.caller, Sequences(count, "prompt"))

    def is_live(self, caller: Caller, request_id: str) -> bool:
        """Return whether a request of the caller's tenant is at this gateway and has not ended."""
        return qualified(caller.tenant, request_id) in self._live_ids

    @property
    def in_flight(self) -> int:
        """Number of admitted requests that have not ended."""
        return self._limits.admission.requests

    @property
    def slow_clients(self) -> SlowClients:
        """The watch for slow clients, over all streams."""
        return self._limits.slow_clients

    async def token_ids(
        self, model: str, prompt: gateway_pb2.Prompt, caller: Caller = ANONYMOUS, *, open_turn: bool = True
    ) -> list[int]:
        """Return a prompt's token ids. False as `open_turn` leaves out the start of an assistant's turn.

        Raises a ServiceError.
        """
        served, tokenizer = self._fleet.model(model), self._preparation.tokenizer
        return await tokenizer.token_ids(served, prompt, open_turn=open_turn, tenant=caller.tenant)

    async def prompt_ids(self, request: gateway_pb2.GenerateRequest, caller: Caller) -> list[int]:
        """Return the token ids of a request's prompt, truncated as it says. Raises a ServiceError."""
        return await self._preparation.prompt_ids(request, self._fleet.model(request.model), caller)

    async def rendered(self, request: gateway_pb2.GenerateRequest, caller: Caller) -> list[int]:
        """Return the token ids that `generate` would compute of a request's prompt, without a generation.

        Raises a ServiceError, also for a fault in another field than the prompt.
        """
        self.check(request)
        caller.check_priority(request.priority)
        token_ids = await self.prompt_ids(request, caller)
        check_fits(len(token_ids), "prompt", self._fleet.model(request.model))
        if not token_ids:
            raise InvalidField("prompt must have at least 1 token", "prompt")
        return token_ids

    async def text(self, request: gateway_pb2.DetokenizeRequest) -> str:
        """Return the text of token ids. Raises a ServiceError."""
        served = self._fleet.model(request.model)
        check_fits(len(request.token_ids), "token_ids", served)
        check_ids(request.token_ids, "token_ids", served.description().vocabulary_size)
        skip = not request.special_tokens
        return await asyncio.to_thread(served.tokenizer.decode, list(request.token_ids), skip_special_tokens=skip)

    def tokenizer(self, model: str) -> Tokenizer:
        """Return the tokenizer of a served model. Raises UnknownModel or Unavailable."""
        return self._fleet.model(model).tokenizer

    def loads(self) -> list[CurrentLoad]:
        """Return the loads of the engines that accept requests, in an order that stays. Raises Unavailable if none."""
        loads = self._fleet.loads()
        if not loads:
            raise Unavailable("no engine accepts requests")
        return loads

    def models(self) -> list[gateway_pb2.GetModelResponse]:
        """Describe the models of connected engines, ordered by name."""
        return [_describe(model) for model in self._fleet.models()]

    def model(self, name: str) -> gateway_pb2.GetModelResponse:
        """Describe a model; an empty name selects the only one. Raises UnknownModel or Unavailable."""
        return _describe(self._fleet.model(name))

    def prune(self, now: float) -> None:
        """Drop the state of models, engines and tenants that are gone for longer than their retention."""
        self._fleet.prune(now)
        models, tenants = self._fleet.model_names(), self._limits.tenants
        self._limits.admission.retain_models(models)
        usable = self._fleet.usable_engines()
        self._observer.on_inventory(Inventory(self._fleet.engines(), models, tenants.tenant_names(), usable), now)
        tenants.prune(now)

    @property
    def is_draining(self) -> bool:
        """Whether new requests are rejected."""
        return self._draining

    async def drain(self) -> None:
        """Reject new requests. Return when none is in flight and clients have stopped sending, or should have."""
        self._draining = True
        self._last_rejected_at = started = self._clock()
        await self._idle.wait()
        while (done_at := min(self._last_rejected_at + _QUIET_SECONDS, started + _MAX_NOTICE_SECONDS)) > self._clock():
            await asyncio.sleep(done_at - self._clock())

    def _info(self, request: gateway_pb2.GenerateRequest, origin: Origin) -> RequestInfo:
        try:
            model_name = self._fleet.model(request.model).name
        except ServiceError:
            model_name = ""
        arrival = self._clock()
        span = self._tracing.start_span("generate", origin.trace_parent, at=arrival)
        return RequestInfo(request.request_id, model_name, origin, arrival, span)

    def _admit(
        self,
        resources: AsyncExitStack,
        request: gateway_pb2.GenerateRequest,
        info: RequestInfo,
        observer: RequestObserver,
    ) -> AdmittedRequest:
        """Admit a request by its token upper bound, and acquire its resources, before any work is done for it."""
        caller, clock = info.origin.caller, self._clock
        own = checked(request)
        timeout = timeout_of(own, info.origin.seconds_left)
        caller.check_priority(own.priority)
        resources.enter_context(self._live_id(caller, own.request_id))
        model = self._fleet.model(request.model)
        tokens = token_upper_bound(request, model.description().context_tokens, model.defaults)
        sequences = sequences_of(request)
        reservation = resources.enter_context(self._limits.tenants.admitted(caller, tokens, sequences))
        slot = resources.enter_context(self._slot(model, tokens, request, info.arrival))
        deadline = Deadline.after(info.arrival, timeout, clock)
        resources.enter_context(deadline.reported(lambda: observer.on_deadline_exceeded(queued=slot.queued)))
        resources.enter_context(model.in_use())
        return AdmittedRequest(model, own, fill_defaults(own, model.defaults), reservation, slot, deadline)

    async def _submit(
        self,
        resources: AsyncExitStack,
        prepared: PreparedRequest,
        observer: RequestObserver,
        writer: Writer | None,
    ) -> tuple[Responses, ClientStream]:
        """Submit a request to an engine; return its responses and the watched stream to its client."""
        attempts = RequestAttempts(prepared, self._dispatcher, self._limits.failover, self._clock)
        generation = resources.enter_context(Generation(prepared, attempts, self._clock))
        if writer is not None:
            generation.write_tokens(writer, observer)
        await attempts.submit()
        responses = await resources.enter_async_context(aclosing(generation.responses()))
        return responses, resources.enter_context(self.slow_clients.watched(generation, observer.on_slow_client))

    @contextmanager
    def _live_id(self, caller: Caller, request_id: str) -> Iterator[None]:
        """Reserve the id for one caller: two engines would not detect that both have it."""
        live_id = qualified(caller.tenant, request_id)
        if live_id in self._live_ids:
            raise RequestExists(f"request_id {request_id!r} is live", "request_id")
        self._live_ids.add(live_id)
        try:
            yield
        finally:
            self._live_ids.remove(live_id)

    @contextmanager
    def _slot(
        self, model: ServedModel, tokens: int, request: gateway_pb2.GenerateRequest, arrival: float
    ) -> Iterator[AdmissionSlot]:
        if self._draining:
            self._last_rejected_at = self._clock()
            raise Unavailable("the gateway is draining", rejection=RejectionReason.DRAINING)
        admission = self._limits.admission
        slot = admission.admit(model.name, tokens, arrival, sequences_of(request))
        self._idle.clear()
        try:
            yield slot
        except Overloaded as error:
            if error.rejection is RejectionReason.ENGINE_QUEUE:  # of every engine
                error.retry_seconds = admission.seconds_until_next_end(self._clock())
            raise
        finally:
            slot.release(self._clock())
            if not admission.requests:
                self._idle.set()


def _describe(model: ServedModel) -> gateway_pb2.GetModelResponse:
    engine, engines = model.description(), [link.description() for link in model.ready_links().values()]
    dialect = model.tokenizer.chat.dialect
    return gateway_pb2.GetModelResponse(
        model=model.name,
        context_tokens=engine.context_tokens,
        vocabulary_size=engine.vocabulary_size,
        block_size=engine.block_size,
        device_blocks=engine.device_blocks,
        dtype=engine.dtype,
        engines=len(engines),
        # Older engines report none.
        devices=sorted({one.device for one in engines} - {""}),
        weights=sorted({one.weights for one in engines} - {""}),
        kv_dtypes=sorted({one.kv_dtype for one in engines} - {""}),
        generation_defaults=model.defaults,
        call_format=dialect.calls.name if dialect.calls else "",
        thought_format=dialect.thought.name if dialect.thought else "",
    )
