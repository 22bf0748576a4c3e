"""Takes requests in: checks them, makes token ids of their prompts, and gives them to the engine."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from google.protobuf.duration_pb2 import Duration

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.duration import duration
from services.errors import InvalidField, Overloaded, Unavailable, UnknownModel
from services.gateway.admission import Admission, Place
from services.gateway.callers import ANYONE, Caller
from services.gateway.chat_template import ChatTemplateError
from services.gateway.deadlines import Deadline
from services.gateway.engine_link import EngineLink
from services.gateway.generation import Generation, SampleText
from services.gateway.measured import measured
from services.gateway.observer import GatewayObserver
from services.gateway.parameters import Parameters, check_prompt
from services.gateway.request_weight import RequestWeight, most_prompt_tokens
from services.gateway.slow_clients import SlowClients
from services.gateway.text_stream import TextStream
from services.gateway.tokenizer import Tokenizer

# Above this, tokenizing takes longer than other streams should wait.
_LONGEST_PROMPT_TOKENIZED_AT_ONCE = 4096
_ACTIONS = ", ".join(field.name for field in gateway_pb2.AdminRequest.DESCRIPTOR.oneofs_by_name["action"].fields)


class FrontDesk:
    """Everything between a client's request and its generation."""

    def __init__(
        self,
        link: EngineLink,
        tokenizer: Tokenizer,
        admission: Admission,
        slow_clients: SlowClients,
        observer: GatewayObserver,
        clock: Callable[[], float],
    ) -> None:
        """Put the parts together. `clock` is the event loop's, in seconds."""
        self._link = link
        self._observer = observer
        self._tokenizer = tokenizer
        self._admission = admission
        self._clock = clock
        self.slow_clients = slow_clients
        self._draining = False
        self._empty = asyncio.Event()
        self._empty.set()

    async def generate(
        self, request: gateway_pb2.GenerateRequest, caller: Caller = ANYONE, seconds_left: float | None = None
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        """Yield what the client gets. `seconds_left` is the call's own deadline. Raises a ServiceError."""
        del caller
        arrival = self._clock()
        model = self.describe(request.model).model
        parameters = Parameters.of(request).within(seconds_left)
        place = self._admit(request, parameters, arrival)
        deadline = Deadline(parameters.timeout and arrival + parameters.timeout, self._clock)
        try:
            with deadline.told(lambda: self._observer.deadline_passed(model, waiting=place.waiting)):
                generation = await self._submit(request, parameters, place, arrival)
                with self.slow_clients.watched(generation, lambda: self._observer.slow_client(model)) as reader:
                    async with aclosing(self._observed(generation, arrival)) as responses:
                        async for response in responses:
                            if response.HasField("started"):
                                place.started(self._clock())
                            reader.begin()
                            yield response
                            reader.end()
        except Overloaded as error:  # the engine's own queue is full
            if error.retry_seconds is None:
                error.retry_seconds = self._admission.seconds_until_one_ends(self._clock())
            raise
        finally:
            self._leave(place)

    def _observed(self, generation: Generation, arrival: float) -> AsyncGenerator[gateway_pb2.GenerateResponse, None]:
        observer = self._observer.request(generation.model, self._link.description().engine_id)
        return measured(generation.responses(), observer, arrival, self._clock)

    async def token_ids(self, model: str, prompt: gateway_pb2.Prompt, *, open_turn: bool = True) -> list[int]:
        """Return the token ids of a prompt, a chat's with the assistant's turn opened or not. Raises a ServiceError."""
        description = self.describe(model)
        check_prompt(prompt)
        if prompt.WhichOneof("kind") == "token_ids":
            _check_ids(prompt.token_ids.ids, "prompt.token_ids.ids", description.vocabulary_size)
            return list(prompt.token_ids.ids)
        try:
            if prompt.ByteSize() <= _LONGEST_PROMPT_TOKENIZED_AT_ONCE:
                return self._tokenize(prompt, open_turn)
            return await asyncio.to_thread(self._tokenize, prompt, open_turn)
        except ChatTemplateError as error:
            raise InvalidField(f"prompt.chat: {error}", "prompt.chat") from error

    async def text(self, request: gateway_pb2.DetokenizeRequest) -> str:
        """Return the text of token ids. Raises a ServiceError."""
        description = self.describe(request.model)
        _check_ids(request.token_ids, "token_ids", description.vocabulary_size)
        skip = not request.special_tokens
        return await asyncio.to_thread(self._tokenizer.decode, request.token_ids, skip_special_tokens=skip)

    def models(self) -> list[gateway_pb2.GetModelResponse]:
        """Describe the models that an engine is there for, in order of their names."""
        try:
            return [self.model("")]
        except Unavailable:
            return []

    def model(self, name: str) -> gateway_pb2.GetModelResponse:
        """Describe a served model; an empty name means the only one. Raises UnknownModel or Unavailable."""
        engine = self.describe(name)
        return gateway_pb2.GetModelResponse(
            model=engine.model,
            context_tokens=engine.context_tokens,
            vocabulary_size=engine.vocabulary_size,
            block_size=engine.block_size,
            device_blocks=engine.device_blocks,
            dtype=engine.dtype,
            engines=1,
        )

    async def administer(self, request: gateway_pb2.AdminRequest, timeout: float) -> gateway_pb2.AdminResponse:
        """Change what a model's engine has pinned, within so many seconds. Raises a ServiceError."""
        self.describe(request.model)
        asked = engine_pb2.EngineAdminRequest()
        match request.WhichOneof("action"):
            case "pin_prefix":
                given = request.pin_prefix
                token_ids = await self._prefix_ids(request.model, given.prompt)
                pin = engine_pb2.PinTokens(name=given.name, token_ids=token_ids, salt=given.salt.encode())
                asked.pin_prefix.CopyFrom(pin)
            case "unpin_prefix":
                asked.unpin_prefix.CopyFrom(request.unpin_prefix)
            case "reset_prefix_cache":
                asked.reset_prefix_cache.SetInParent()
            case "list_pinned":
                asked.list_pinned.SetInParent()
            case _:
                raise InvalidField(f"action is missing: give one of {_ACTIONS}", "action")
        response = await self._link.administer(asked, timeout)
        return gateway_pb2.AdminResponse(pins=response.pins)

    async def _prefix_ids(self, model: str, prompt: gateway_pb2.Prompt) -> list[int]:
        try:
            return await self.token_ids(model, prompt, open_turn=False)
        except InvalidField as error:
            raise InvalidField(f"pin_prefix.{error}", f"pin_prefix.{error.field}") from error

    def describe(self, model: str) -> engine_pb2.GetEngineResponse:
        """Describe a model's engine; an empty name means the only one. Raises UnknownModel or Unavailable."""
        description = self._link.description()
        if model not in ("", description.model):
            raise UnknownModel(f"model {model!r} is not served, {description.model!r} is", "model")
        return description

    async def drain(self) -> None:
        """Refuse new requests from now on, and return when none is left."""
        self._draining = True
        await self._empty.wait()

    def _admit(self, request: gateway_pb2.GenerateRequest, parameters: Parameters, now: float) -> Place:
        """Let a request in by the most that it can weigh, before anything is done for it."""
        if self._draining:
            raise Unavailable("the gateway is draining")
        engine = self.describe(request.model)
        most = RequestWeight.of(parameters, engine.context_tokens).with_prompt(most_prompt_tokens(request.prompt))
        try:
            place = self._admission.enter(engine.model, most, now)
        except Overloaded:
            self._observer.refused(engine.model)
            raise
        self._empty.clear()
        return place

    def _leave(self, place: Place) -> None:
        place.leave(self._clock())
        if not self._admission.requests:
            self._empty.set()

    async def _submit(
        self, request: gateway_pb2.GenerateRequest, parameters: Parameters, place: Place, arrival: float
    ) -> Generation:
        description = self.describe(request.model)
        _check_vocabulary(parameters, description.vocabulary_size)
        token_ids = await self.token_ids(request.model, request.prompt)
        weight = RequestWeight.of(parameters, description.context_tokens)
        place.weigh(weight.with_prompt(len(token_ids)), self._clock())
        submission = engine_pb2.Submission(
            request_id=parameters.request_id,
            prompt_token_ids=token_ids,
            samples=[engine_pb2.SampleState()] * parameters.sampling.sample_count,
            sampling=parameters.sampling,
            logit_rules=parameters.logit_rules,
            beam_search=parameters.beam_search,
            logprobs=parameters.logprobs,
            prompt_logprobs=parameters.prompt_logprobs,
            constraint=parameters.constraint,
            stopping=_engine_stopping(parameters, len(token_ids), description, self._link.request_blocks),
            salt=parameters.salt.encode(),
            priority=parameters.priority,
            age=duration(self._clock() - arrival),
            timeout=_time_left(parameters, self._clock() - arrival),
        )
        return Generation(
            link=self._link,
            ticket=self._link.submit(submission),
            parameters=parameters,
            model=description.model,
            samples=[
                SampleText(TextStream(self._tokenizer, parameters.stopping, parameters.special_tokens))
                for _ in submission.samples
            ],
            arrival=arrival,
            clock=self._clock,
        )

    def _tokenize(self, prompt: gateway_pb2.Prompt, open_turn: bool) -> list[int]:
        if prompt.WhichOneof("kind") == "text":
            return self._tokenizer.encode(prompt.text)
        messages = [(message.role, message.content) for message in prompt.chat.messages]
        return self._tokenizer.encode_chat(messages, open_turn=open_turn)


def _time_left(parameters: Parameters, spent_seconds: float) -> Duration | None:
    return None if parameters.timeout is None else duration(max(0.0, parameters.timeout - spent_seconds))


def _engine_stopping(
    parameters: Parameters, prompt_tokens: int, description: engine_pb2.GetEngineResponse, request_blocks: int
) -> decoding_pb2.Stopping:
    rules, most = parameters.stopping, parameters.stopping.max_tokens
    if most is None:
        search = parameters.beam_search
        sequences = search.width if search else parameters.sampling.sample_count
        most = _most_tokens(prompt_tokens, sequences, description, request_blocks)
    return decoding_pb2.Stopping(
        max_tokens=most,
        min_tokens=rules.min_tokens,
        stop_token_ids=rules.token_ids,
        ignore_eos=rules.ignore_eos,
    )


def _most_tokens(
    prompt_tokens: int, sequences: int, description: engine_pb2.GetEngineResponse, request_blocks: int
) -> int:
    """Return how many tokens fit after the prompt; at least 1, so that the engine says what does not fit.

    Samples and beams share the whole blocks of the prompt. The last token generated is never fed back, so it takes no
    slot.
    """
    shared = min(prompt_tokens // description.block_size, request_blocks)
    slots = (shared + (request_blocks - shared) // sequences) * description.block_size + 1
    return max(1, min(description.context_tokens, slots) - prompt_tokens)


def _check_vocabulary(parameters: Parameters, vocabulary_size: int) -> None:
    rules = parameters.logit_rules
    _check_ids(parameters.stopping.token_ids, "stopping.stop_token_ids", vocabulary_size)
    _check_ids(rules.allowed_token_ids, "logit_rules.allowed_token_ids", vocabulary_size)
    for token in sorted(rules.logit_bias):
        _check_id(token, f"logit_rules.logit_bias[{token}]", vocabulary_size)


def _check_ids(token_ids: Iterable[int], field: str, vocabulary_size: int) -> None:
    for position, token in enumerate(token_ids):
        _check_id(token, f"{field}[{position}]", vocabulary_size)


def _check_id(token: int, field: str, vocabulary_size: int) -> None:
    if not 0 <= token < vocabulary_size:
        raise InvalidField(f"{field} is token {token}, the vocabulary has {vocabulary_size} tokens", field)
