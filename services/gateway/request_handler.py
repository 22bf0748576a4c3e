"""Takes requests in: checks them, makes token ids of their prompts, and has engines work on them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.gateway.access.admission import Admission, Place
from services.gateway.access.callers import SOMEWHERE, Caller, Origin
from services.gateway.access.namespace import Namespace, qualified
from services.gateway.access.slow_clients import Reader, SlowClients
from services.gateway.access.tenant_usage import TenantUsage
from services.gateway.access.tenants import Tenants
from services.gateway.deadlines import Deadline
from services.gateway.fleet.dispatch import Dispatcher
from services.gateway.fleet.fleet import Fleet, ServedModel
from services.gateway.generation import FailoverLimits, Generation, SampleText
from services.gateway.measured import measured
from services.gateway.observer import GatewayObserver
from services.gateway.parameters import Parameters, check_prompt
from services.gateway.request_reports import RequestReport, RequestReports
from services.gateway.text.chat_template import ChatTemplateError, ToolsUnknown
from services.gateway.text.conversation import conversation_of
from services.gateway.text.text_stream import TextStream
from services.gateway.text.token_bound import most_tokens, sequences_of
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidField, Overloaded, RejectionReason, RequestIsLive, ServiceError, Unavailable
from services.runtime.tracing import Span
from services.wire.duration import duration

# Above this, tokenizing takes longer than other streams should wait.
_LONGEST_PROMPT_TOKENIZED_AT_ONCE = 4096

# A server that closes cancels calls that it has not looked at yet, and clients do not repeat what was cancelled. So it
# is not closed before clients that watch its health, or whoever balances their load, have turned away.
_QUIET_SECONDS = 0.5
_NOTICE_SECONDS = 5.0


@dataclass(frozen=True)
class DeskLimits:
    """How much may be under way, in all and of each tenant, how it goes on when engines die, and who is too slow."""

    admission: Admission
    failover: FailoverLimits
    tenants: Tenants
    slow_clients: SlowClients


class RequestHandler:
    """Everything between a client's request and its generation. `clock` is the event loop's, in seconds."""

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        limits: DeskLimits,
        namespace: Namespace,
        observer: GatewayObserver,
        reports: RequestReports,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._limits = limits
        self._namespace = namespace
        self._observer = observer
        self._reports = reports
        self._clock = clock
        self._ids: set[str] = set()
        self._draining = False
        self._usage = TenantUsage()
        observer.tenants(self._usage.figures, limits.tenants.rejections)
        self._last_refused_at = 0.0
        self._empty = asyncio.Event()
        self._empty.set()

    async def generate(
        self, request: gateway_pb2.GenerateRequest, origin: Origin = SOMEWHERE
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """Yield what the client gets. Raises a ServiceError."""
        arrival, caller = self._clock(), origin.caller
        with (
            self._refusal_told(request.model),
            self._reports.begin(request.request_id, self._served_name(request.model), origin, arrival) as report,
            self._own_id(caller, _parameters(request, origin)) as parameters,
            self._limits.tenants.admitted(caller, self._most_tokens(request), sequences_of(request)) as reserved,
            self._admitted(request, arrival) as place,
            self._deadline_told(request.model, parameters, arrival, (place, report)),
            self._stream_told(request.model, origin.protocol),
        ):
            report.admitted(parameters.request_id, self._fleet.model(request.model).name)
            generation = await self._prepared(request, caller, parameters, arrival, report.span)
            report.submitted(generation)
            reserved.expect(generation.most_tokens(), generation.used_tokens)
            place.weigh(generation.most_tokens(), self._clock())
            async with aclosing(self._observed(generation, await generation.begin(), arrival)) as responses:
                with (
                    self._watched(generation, report) as reader,
                    self._usage.under_way(caller.tenant, generation),
                ):
                    async for response in responses:
                        if response.HasField("started"):
                            place.started(self._clock())
                        elif response.HasField("finished"):
                            report.finished(response.finished)
                        reader.begin()
                        yield response
                        reader.end()

    @property
    def slow_clients(self) -> SlowClients:
        """Who watches the clients of all streams."""
        return self._limits.slow_clients

    async def token_ids(self, model: str, prompt: gateway_pb2.Prompt, *, open_turn: bool = True) -> list[int]:
        """Return the token ids of a prompt, a chat's with the assistant's turn opened or not. Raises a ServiceError."""
        served = self._fleet.model(model)
        check_prompt(prompt)
        if prompt.WhichOneof("kind") == "token_ids":
            _check_ids(prompt.token_ids.ids, "prompt.token_ids.ids", served.description().vocabulary_size)
            return list(prompt.token_ids.ids)
        try:
            if prompt.ByteSize() <= _LONGEST_PROMPT_TOKENIZED_AT_ONCE:
                return _tokenize(served, prompt, open_turn)
            return await asyncio.to_thread(_tokenize, served, prompt, open_turn)
        except ToolsUnknown as error:
            raise InvalidField(f"prompt.chat.tools: {error}", "prompt.chat.tools") from error
        except ChatTemplateError as error:
            raise InvalidField(f"prompt.chat: {error}", "prompt.chat") from error

    async def text(self, request: gateway_pb2.DetokenizeRequest) -> str:
        """Return the text of token ids. Raises a ServiceError."""
        served = self._fleet.model(request.model)
        _check_fits(len(request.token_ids), "token_ids", served)
        _check_ids(request.token_ids, "token_ids", served.description().vocabulary_size)
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
        self._limits.admission.keep(models)
        self._usage.forget(models, tenants.names(), now)
        tenants.forget(now)
        self._observer.fleet(self._fleet.engines(), models, now)

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when none is left and clients have noticed, or should have."""
        self._draining = True
        self._last_refused_at = begun = self._clock()
        await self._empty.wait()
        while (quiet_at := min(self._last_refused_at + _QUIET_SECONDS, begun + _NOTICE_SECONDS)) > self._clock():
            await asyncio.sleep(quiet_at - self._clock())

    @contextmanager
    def _admitted(self, request: gateway_pb2.GenerateRequest, arrival: float) -> Iterator[Place]:
        """Give a request a place, by the most that it can weigh: nothing was done for it yet."""
        if self._draining:
            self._last_refused_at = self._clock()
            raise Unavailable("the gateway is draining", refusal=RejectionReason.DRAINING)
        admission, model = self._limits.admission, self._fleet.model(request.model).name
        place = admission.enter(model, self._most_tokens(request), arrival, sequences_of(request))
        self._empty.clear()
        try:
            yield place
        except Overloaded as error:  # the engines' own queues are full
            error.retry_seconds = admission.seconds_until_one_ends(self._clock())
            raise
        finally:
            place.leave(self._clock())
            if not admission.requests:
                self._empty.set()

    @contextmanager
    def _refusal_told(self, model: str) -> Iterator[None]:
        try:
            yield
        except ServiceError as error:
            if error.refusal is not None:
                self._observer.refused(self._served_name(model), error.refusal)
            raise

    def _served_name(self, model: str) -> str:
        """Return the name of a served model; empty while there is none: what clients make up is no label."""
        try:
            return self._fleet.model(model).name
        except ServiceError:
            return ""

    @contextmanager
    def _stream_told(self, model: str, protocol: str) -> Iterator[None]:
        served = self._fleet.model(model)
        served.under_way += 1
        self._observer.stream_opened(served.name, protocol)
        try:
            yield
        finally:
            served.under_way -= 1
            self._observer.stream_closed(served.name, protocol)

    @contextmanager
    def _deadline_told(
        self, model: str, parameters: Parameters, arrival: float, told: tuple[Place, RequestReport]
    ) -> Iterator[None]:
        name, (place, report) = self._fleet.model(model).name, told
        deadline = Deadline(None if parameters.timeout is None else arrival + parameters.timeout, self._clock)

        def passed() -> None:
            report.deadline_passed()
            self._observer.deadline_passed(name, waiting=place.waiting)

        with deadline.told(passed):
            yield

    def _watched(self, generation: Generation, report: RequestReport) -> AbstractContextManager[Reader]:
        def told() -> None:
            report.client_is_slow()
            self._observer.slow_client(generation.model.name)

        return self.slow_clients.watched(generation, told)

    def _observed(
        self, generation: Generation, engine_id: str, arrival: float
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        observer = self._observer.request(generation.model.name, engine_id)
        return measured(generation.responses(), observer, arrival, self._clock)

    @contextmanager
    def _own_id(self, caller: Caller, parameters: Parameters) -> Iterator[Parameters]:
        """Keep the caller from using the request's id again: two engines would not know of each other's requests."""
        own = qualified(caller.tenant, parameters.request_id)
        if own in self._ids:
            raise RequestIsLive(f"request_id {parameters.request_id!r} is live", "request_id")
        self._ids.add(own)
        try:
            yield parameters
        finally:
            self._ids.remove(own)

    def _most_tokens(self, request: gateway_pb2.GenerateRequest) -> int:
        return most_tokens(request, self._fleet.model(request.model).description().context_tokens)

    async def _prepared(
        self, request: gateway_pb2.GenerateRequest, caller: Caller, parameters: Parameters, arrival: float, span: Span
    ) -> Generation:
        model = self._fleet.model(request.model)
        _check_vocabulary(parameters, model.description().vocabulary_size)
        if request.prompt.HasField("token_ids"):
            _check_fits(len(request.prompt.token_ids.ids), "prompt.token_ids.ids", model)
        with span.child("tokenize"):
            token_ids = await self.token_ids(model.name, request.prompt)
        _check_fits(len(token_ids), "prompt", model)
        submission = engine_pb2.Submission(
            request_id=qualified(caller.tenant, parameters.request_id),
            attempt=1,
            prompt_token_ids=token_ids,
            samples=[engine_pb2.SampleState()] * parameters.sampling.sample_count,
            sampling=parameters.sampling,
            logit_rules=parameters.logit_rules,
            beam_search=parameters.beam_search,
            logprobs=parameters.logprobs,
            prompt_logprobs=parameters.prompt_logprobs,
            constraint=parameters.constraint,
            stopping=_engine_stopping(parameters, len(token_ids), model),
            salt=self._namespace.salt(caller.tenant, parameters.salt),
            priority=parameters.priority,
            age=duration(self._clock() - arrival),
            timeout=_time_left(parameters, self._clock() - arrival),
        )
        return Generation(
            dispatcher=self._dispatcher,
            model=model,
            submission=submission,
            parameters=parameters,
            samples=[
                SampleText(TextStream(model.tokenizer, parameters.stopping, parameters.special_tokens))
                for _ in submission.samples
            ],
            limits=self._limits.failover,
            arrival=arrival,
            clock=self._clock,
            span=span,
        )


def _parameters(request: gateway_pb2.GenerateRequest, origin: Origin) -> Parameters:
    """Check a request, and whether its caller may make it. Raises InvalidField or NotPermitted."""
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


def _time_left(parameters: Parameters, spent_seconds: float) -> Duration | None:
    return None if parameters.timeout is None else duration(max(0.0, parameters.timeout - spent_seconds))


def _engine_stopping(parameters: Parameters, prompt_tokens: int, model: ServedModel) -> decoding_pb2.Stopping:
    rules, most = parameters.stopping, parameters.stopping.max_tokens
    if most is None:
        search = parameters.beam_search
        sequences = search.width if search else parameters.sampling.sample_count
        most = _most_tokens(prompt_tokens, sequences, model)
    return decoding_pb2.Stopping(
        max_tokens=most,
        min_tokens=rules.min_tokens,
        stop_token_ids=rules.token_ids,
        ignore_eos=rules.ignore_eos,
    )


def _most_tokens(prompt_tokens: int, sequences: int, model: ServedModel) -> int:
    """Return how many tokens fit after the prompt, at any engine; at least 1, so that one says what does not fit.

    Samples and beams share the whole blocks of the prompt. The last token generated is never fed back, so it takes no
    slot.
    """
    description, request_blocks = model.description(), model.request_blocks()
    shared = min(prompt_tokens // description.block_size, request_blocks)
    slots = (shared + (request_blocks - shared) // sequences) * description.block_size + 1
    return max(1, min(description.context_tokens, slots) - prompt_tokens)


def _check_vocabulary(parameters: Parameters, vocabulary_size: int) -> None:
    rules = parameters.logit_rules
    _check_ids(parameters.stopping.token_ids, "stopping.stop_token_ids", vocabulary_size)
    _check_ids(rules.allowed_token_ids, "logit_rules.allowed_token_ids", vocabulary_size)
    for token in sorted(rules.logit_bias):
        _check_id(token, f"logit_rules.logit_bias[{token}]", vocabulary_size)


def _check_fits(count: int, field: str, model: ServedModel) -> None:
    """Refuse, before they cost anything, more tokens than any engine could take."""
    context = model.description().context_tokens
    if count > context:
        raise InvalidField(f"{field} has {count} tokens, the model's context has {context}", field)


def _check_ids(token_ids: Collection[int], field: str, vocabulary_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary_size):
        return  # the usual case, at a tenth of the loop's price
    for position, token in enumerate(token_ids):
        _check_id(token, f"{field}[{position}]", vocabulary_size)


def _check_id(token: int, field: str, vocabulary_size: int) -> None:
    if not 0 <= token < vocabulary_size:
        raise InvalidField(f"{field} is token {token}, the vocabulary has {vocabulary_size} tokens", field)
