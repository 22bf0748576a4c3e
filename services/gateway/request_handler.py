"""Handles requests: checks them, makes token ids of their prompts, and has engines work on them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass

from quire.v1 import gateway_pb2
from services.gateway.access.admission import AdmissionControl, AdmittedRequest
from services.gateway.access.callers import DEFAULT_ORIGIN, Caller, Origin
from services.gateway.access.namespace import Namespace, qualified
from services.gateway.access.slow_clients import Reader, SlowClients
from services.gateway.access.tenants import Reservation, Tenants
from services.gateway.access.token_bound import most_tokens, sequences_of
from services.gateway.attempts import FailoverLimits, RequestAttempts
from services.gateway.deadlines import Deadline
from services.gateway.fleet.dispatch import Dispatcher
from services.gateway.fleet.fleet import Fleet, ServedModel
from services.gateway.generation import Generation
from services.gateway.observe.observer import GatewayObserver, Inventory, RequestInfo, RequestObserver, RequestProgress
from services.gateway.parameters import Parameters, check_prompt
from services.gateway.prepared_request import (
    PreparedRequest,
    check_fits,
    check_ids,
    check_vocabulary,
    submission_of,
    write_times,
)
from services.gateway.text.chat_template import ChatTemplateError, ToolsNotSupported
from services.gateway.text.conversation import conversation_of
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidField, Overloaded, RejectionReason, RequestExists, ServiceError, Unavailable
from services.runtime.tracing.spans import Tracing

# Above this, tokenizing takes longer than other streams should wait.
_LONGEST_PROMPT_TOKENIZED_AT_ONCE = 4096

# A server that closes cancels calls that it has not looked at yet, and clients do not repeat what was cancelled. So it
# is not closed before clients that watch its health, or whoever balances their load, have turned away.
_QUIET_SECONDS = 0.5
_NOTICE_SECONDS = 5.0

Responses = AsyncGenerator[gateway_pb2.GenerateResponse, None]


@dataclass(frozen=True)
class RequestLimits:
    """How much may be under way, in all and of each tenant, how it goes on when engines die, and who is too slow."""

    admission: AdmissionControl
    failover: FailoverLimits
    tenants: Tenants
    slow_clients: SlowClients


@dataclass(frozen=True)
class _Life:
    """What a request holds from its admission to its end."""

    model: ServedModel
    parameters: Parameters
    reservation: Reservation
    place: AdmittedRequest
    deadline: Deadline


class RequestHandler:
    """Everything between a client's request and its generation. `clock` is the event loop's, in seconds."""

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
        """`observer` must not raise: GatewayObservers sees to that."""
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._limits = limits
        self._namespace = namespace
        self._observer = observer
        self._tracing = tracing
        self._clock = clock
        self._ids: set[str] = set()
        self._draining = False
        self._last_refused_at = 0.0
        self._empty = asyncio.Event()
        self._empty.set()

    async def generate(self, request: gateway_pb2.GenerateRequest, origin: Origin = DEFAULT_ORIGIN) -> Responses:
        """Yield what the client gets. Raises a ServiceError.

        All that the request holds is on one stack, which gives it back in the reverse order, whatever happens.
        Observers are called beside it, and last.
        """
        info = self._info(request, origin)
        observer, finished = self._observer.on_request(info), None
        try:
            async with AsyncExitStack() as held:
                life = self._admit(held, request, info, observer)
                observer.on_admitted(life.parameters.request_id)
                prepared = await self._prepare(request, info, life)
                observer.on_prepared(prepared.progress)
                life.reservation.expect(prepared.most_tokens(), prepared.progress.used_tokens)
                life.place.weigh(prepared.most_tokens(), self._clock())
                responses, reader = await self._begin(held, prepared, observer)
                observer.on_submitted(prepared.progress)
                async for response in responses:
                    match response.WhichOneof("event"):
                        case "delta":
                            observer.on_tokens(response.delta, self._clock())
                        case "started":
                            life.place.started(self._clock())
                            observer.on_started(response.started)
                        case "finished":
                            finished = response.finished
                    reader.begin()
                    yield response
                    reader.end()
        except BaseException as error:
            if finished is None:
                observer.on_failed(error, self._clock())
            raise
        finally:
            if finished is not None:
                observer.on_ended(finished, self._clock())

    @property
    def slow_clients(self) -> SlowClients:
        """The watch over the clients of all streams."""
        return self._limits.slow_clients

    async def token_ids(self, model: str, prompt: gateway_pb2.Prompt, *, open_turn: bool = True) -> list[int]:
        """Return the token ids of a prompt, a chat's with the assistant's turn opened or not. Raises a ServiceError."""
        served = self._fleet.model(model)
        check_prompt(prompt)
        if prompt.WhichOneof("kind") == "token_ids":
            check_ids(prompt.token_ids.ids, "prompt.token_ids.ids", served.description().vocabulary_size)
            return list(prompt.token_ids.ids)
        try:
            if prompt.ByteSize() <= _LONGEST_PROMPT_TOKENIZED_AT_ONCE:
                return _tokenize(served, prompt, open_turn)
            return await asyncio.to_thread(_tokenize, served, prompt, open_turn)
        except ToolsNotSupported as error:
            raise InvalidField(f"prompt.chat.tools: {error}", "prompt.chat.tools") from error
        except ChatTemplateError as error:
            raise InvalidField(f"prompt.chat: {error}", "prompt.chat") from error

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

    def models(self) -> list[gateway_pb2.GetModelResponse]:
        """Describe the models that an engine is there for, in order of their names."""
        return [_described(model) for model in self._fleet.models()]

    def model(self, name: str) -> gateway_pb2.GetModelResponse:
        """Describe a served model; an empty name means the only one. Raises UnknownModel or Unavailable."""
        return _described(self._fleet.model(name))

    def forget(self, now: float) -> None:
        """Forget what was counted of models, engines and tenants that are gone, a while after that."""
        self._fleet.forget(now)
        models, tenants = self._fleet.names(), self._limits.tenants
        self._limits.admission.retain_models(models)
        self._observer.on_inventory(Inventory(self._fleet.engines(), models, tenants.names()), now)
        tenants.forget(now)

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when none is left and clients have noticed, or should have."""
        self._draining = True
        self._last_refused_at = begun = self._clock()
        await self._empty.wait()
        while (quiet_at := min(self._last_refused_at + _QUIET_SECONDS, begun + _NOTICE_SECONDS)) > self._clock():
            await asyncio.sleep(quiet_at - self._clock())

    def _info(self, request: gateway_pb2.GenerateRequest, origin: Origin) -> RequestInfo:
        try:
            model_name = self._fleet.model(request.model).name
        except ServiceError:
            model_name = ""
        arrival = self._clock()
        span = self._tracing.start_span("generate", origin.trace_parent, at=arrival)
        return RequestInfo(request.request_id, model_name, origin, arrival, span)

    def _admit(
        self, held: AsyncExitStack, request: gateway_pb2.GenerateRequest, info: RequestInfo, observer: RequestObserver
    ) -> _Life:
        """Acquire what a request holds before anything is done for it, by the most that it can weigh."""
        caller, clock = info.origin.caller, self._clock
        parameters = _parameters(request, info.origin)
        held.enter_context(self._own_id(caller, parameters.request_id))
        model = self._fleet.model(request.model)
        most, sequences = most_tokens(request, model.description().context_tokens), sequences_of(request)
        reservation = held.enter_context(self._limits.tenants.admitted(caller, most, sequences))
        place = held.enter_context(self._place(model, most, request, info.arrival))
        deadline = Deadline.after(info.arrival, parameters.timeout, clock)
        held.enter_context(deadline.noticed(lambda: observer.on_deadline_passed(waiting=place.waiting)))
        held.enter_context(model.in_use())
        return _Life(model, parameters, reservation, place, deadline)

    async def _begin(
        self, held: AsyncExitStack, prepared: PreparedRequest, observer: RequestObserver
    ) -> tuple[Responses, Reader]:
        """Give a request to an engine; return its responses, and the watch over the client that reads them."""
        attempts = RequestAttempts(prepared, self._dispatcher, self._limits.failover, self._clock)
        generation = held.enter_context(Generation(prepared, attempts, self._clock))
        await attempts.begin()
        responses = await held.enter_async_context(aclosing(generation.responses()))
        return responses, held.enter_context(self.slow_clients.watched(generation, observer.on_slow_client))

    @contextmanager
    def _own_id(self, caller: Caller, request_id: str) -> Iterator[None]:
        """Keep the caller from using the id again: two engines would not know of each other's requests."""
        own = qualified(caller.tenant, request_id)
        if own in self._ids:
            raise RequestExists(f"request_id {request_id!r} is live", "request_id")
        self._ids.add(own)
        try:
            yield
        finally:
            self._ids.remove(own)

    @contextmanager
    def _place(
        self, model: ServedModel, most: int, request: gateway_pb2.GenerateRequest, arrival: float
    ) -> Iterator[AdmittedRequest]:
        if self._draining:
            self._last_refused_at = self._clock()
            raise Unavailable("the gateway is draining", rejection=RejectionReason.DRAINING)
        admission = self._limits.admission
        place = admission.admit(model.name, most, arrival, sequences_of(request))
        self._empty.clear()
        try:
            yield place
        except Overloaded as error:  # the engines' own queues are full
            error.retry_seconds = admission.seconds_until_next_end(self._clock())
            raise
        finally:
            place.leave(self._clock())
            if not admission.requests:
                self._empty.set()

    async def _prepare(self, request: gateway_pb2.GenerateRequest, info: RequestInfo, life: _Life) -> PreparedRequest:
        model, parameters, tenant = life.model, life.parameters, info.origin.caller.tenant
        check_vocabulary(parameters, model.description().vocabulary_size)
        if request.prompt.HasField("token_ids"):
            check_fits(len(request.prompt.token_ids.ids), "prompt.token_ids.ids", model)
        with info.span.start_child("tokenize"):
            token_ids = await self.token_ids(model.name, request.prompt)
        check_fits(len(token_ids), "prompt", model)
        own, salt = qualified(tenant, parameters.request_id), self._namespace.salt(tenant, parameters.salt)
        submission = submission_of(parameters, token_ids, model, own, salt)
        write_times(submission, life.deadline, info.arrival)
        progress = RequestProgress(len(token_ids))
        return PreparedRequest(model, parameters, submission, info.arrival, life.deadline, progress, info.span)


def _parameters(request: gateway_pb2.GenerateRequest, origin: Origin) -> Parameters:
    """Check a request, and whether its caller may make it. Raises InvalidField or PermissionDenied."""
    parameters = Parameters.of(request).within(origin.seconds_left)
    origin.caller.check_priority(parameters.priority)
    return parameters


def _described(model: ServedModel) -> gateway_pb2.GetModelResponse:
    engine = model.description()
    return gateway_pb2.GetModelResponse(
        model=model.name,
        context_tokens=engine.context_tokens,
        vocabulary_size=engine.vocabulary_size,
        block_size=engine.block_size,
        device_blocks=engine.device_blocks,
        dtype=engine.dtype,
        engines=len(model.ready()),
    )


def _tokenize(model: ServedModel, prompt: gateway_pb2.Prompt, open_turn: bool) -> list[int]:
    if prompt.WhichOneof("kind") == "text":
        return model.tokenizer.encode(prompt.text)
    return model.tokenizer.encode_chat(conversation_of(prompt.chat), open_turn=open_turn)
