"""A request ready for submission, and the one place that makes it: checked, tokenized, with its limits filled in."""

import asyncio
from collections.abc import Awaitable, Collection
from dataclasses import dataclass

from blocks import blocks_for
from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.gateway.access.admission import AdmissionSlot
from services.gateway.access.callers import Caller
from services.gateway.access.namespace import Namespace, qualified
from services.gateway.access.tenants import Reservation
from services.gateway.access.token_bound import sequences_of
from services.gateway.deadlines import Deadline
from services.gateway.fleet.engine_events import deadline_error
from services.gateway.fleet.fleet import ServedModel
from services.gateway.observe.observer import RequestInfo, RequestProgress
from services.gateway.request_checks import check_fits, check_room, check_truncation, check_vocabulary
from services.gateway.text.bad_words import sequences_of as sequences_of_words
from services.gateway.tokenization import PromptTokenizer
from services.runtime.errors import ContextExceeded, InvalidField, ServiceError
from services.runtime.tracing.spans import NO_SPAN, Span
from services.wire.duration import duration

_AS_MANY_AS_FIT = -1
_LENGTHS = ("prompt", "stopping.max_tokens")  # the fields that an engine names if a request does not fit


@dataclass(frozen=True)
class AdmittedRequest:
    """A checked request, which has no prompt, with its model and its resources.

    `model_defaults` are the values that the model has for what it leaves out. `caps_output` makes max_tokens at most
    what fits.
    """

    model: ServedModel
    request: gateway_pb2.GenerateRequest
    model_defaults: decoding_pb2.GenerationDefaults
    reservation: Reservation
    slot: AdmissionSlot
    deadline: Deadline
    caps_output: bool = False


@dataclass(frozen=True)
class PreparedRequest:
    """The first submission of a checked request and the state of its generation. `arrival` is in seconds.

    `in_thought`: the prompt has begun a thought.
    """

    model: ServedModel
    request: gateway_pb2.GenerateRequest
    model_defaults: decoding_pb2.GenerationDefaults
    submission: engine_pb2.Submission
    arrival: float
    deadline: Deadline
    progress: RequestProgress
    span: Span = NO_SPAN
    in_thought: bool = False

    def token_upper_bound(self) -> int:
        """Return an upper bound of its tokens, prompt and samples together."""
        sequences = max(len(self.submission.samples), self.submission.beam_search.width)
        return len(self.submission.prompt_token_ids) + sequences * self.submission.stopping.max_tokens

    def overflow_of(self, error: ServiceError) -> ServiceError:
        """Return an engine's refusal as ContextExceeded if it is that of a request too long for the pool."""
        prompt_tokens, max_tokens = len(self.submission.prompt_token_ids), self.submission.stopping.max_tokens
        most = _most_tokens(prompt_tokens, sequences_of(self.request).count, self.model)
        is_of_length = isinstance(error, InvalidField) and error.field in _LENGTHS
        if not is_of_length or prompt_tokens + max_tokens <= most:
            return error
        return ContextExceeded(str(error), error.field, prompt_tokens, most)

    def resumption(self, samples: Collection[engine_pb2.SampleState], *, isolated: bool) -> engine_pb2.Submission:
        """Return a submission that resumes from these samples at another engine."""
        submission = engine_pb2.Submission()
        submission.CopyFrom(self.submission)
        submission.attempt = self.progress.attempts + 1
        submission.isolated = isolated
        _set_times(submission, self.deadline, self.arrival)
        del submission.samples[:]
        submission.samples.extend(samples)
        return submission


class Preparation:
    """Prepares admitted requests. `namespace` separates the prefixes and ids of tenants."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self.tokenizer = PromptTokenizer()

    async def prepare(
        self, given: gateway_pb2.GenerateRequest, info: RequestInfo, admitted: AdmittedRequest
    ) -> PreparedRequest:
        """Prepare a request as the client sent it, which is admitted.

        Raises InvalidField, Overloaded and DeadlineExceeded.
        """
        model, request, tenant = admitted.model, admitted.request, info.origin.caller.tenant
        check_vocabulary(request, model.description().vocabulary_size)
        if given.prompt.HasField("token_ids") and not given.HasField("truncate_prompt_tokens"):
            check_fits(len(given.prompt.token_ids.ids), "prompt.token_ids.ids", model)
        with info.span.start_child("tokenize"):
            token_ids = await _before(admitted.deadline, self.prompt_ids(given, model, info.origin.caller))
        check_fits(len(token_ids), "prompt", model)
        submission = submission_of(admitted, token_ids)
        check_room(len(token_ids), submission.stopping.max_tokens, model.description().context_tokens)
        submission.request_id = qualified(tenant, request.request_id)
        submission.salt = self._namespace.salt(tenant, request.cache.salt)
        if words := request.logit_rules.bad_words:
            sequences = await asyncio.to_thread(sequences_of_words, words, model.tokenizer)
            submission.bad_words.extend(engine_pb2.TokenSequence(token_ids=one) for one in sequences)
        in_thought = _begins_in_thought(given.prompt, token_ids, model)
        begins_at_once = request.HasField("constraint") and model.tokenizer.chat.dialect.channels is not None
        if request.HasField("thought") and not begins_at_once:
            submission.thought.CopyFrom(_thought(request.thought, model, in_thought=in_thought))
        _set_times(submission, admitted.deadline, info.arrival)
        progress = RequestProgress(len(token_ids))
        defaults, deadline = admitted.model_defaults, admitted.deadline
        arrival, span = info.arrival, info.span
        return PreparedRequest(model, request, defaults, submission, arrival, deadline, progress, span, in_thought)

    async def prompt_ids(self, given: gateway_pb2.GenerateRequest, model: ServedModel, caller: Caller) -> list[int]:
        """Return the token ids of a request's prompt, truncated as it says. Raises InvalidField and Overloaded."""
        most = None if given.HasField("truncate_prompt_tokens") else model.description().context_tokens
        token_ids = await self.tokenizer.token_ids(model, given.prompt, most, tenant=caller.tenant)
        return _truncated(token_ids, given, model)


async def _before(deadline: Deadline, tokenizing: Awaitable[list[int]]) -> list[int]:
    """Return the token ids. Raises DeadlineExceeded if the deadline comes first."""
    try:
        async with asyncio.timeout(deadline.seconds_left()):
            return await tokenizing
    except TimeoutError:
        raise deadline_error(started=False) from None


def _begins_in_thought(prompt: gateway_pb2.Prompt, token_ids: list[int], model: ServedModel) -> bool:
    """Return whether a prompt ends within a thought: behind its mark, or in the message that the output continues."""
    tokens = model.tokenizer.dialect_tokens
    if prompt.chat.continue_final_message:
        return tokens.leaves_open(prompt.chat.messages[-1].content)
    return tokens.open_thought(token_ids)


def _thought(given: decoding_pb2.Thought, model: ServedModel, *, in_thought: bool) -> decoding_pb2.Thought:
    """Return a thought with the marks of the model, if it has none of its own. Raises InvalidField."""
    thought, marks = decoding_pb2.Thought(), model.tokenizer.chat.dialect.thought
    thought.CopyFrom(given)
    if not given.end:
        if marks is None:
            raise InvalidField(
                "thought requires a model whose form of thoughts is known; --reasoning-parser of the gateway names one",
                "thought",
            )
        thought.begin, thought.end = marks.start, marks.end
    if in_thought:
        thought.ClearField("begin")
    return thought


def submission_of(admitted: AdmittedRequest, token_ids: list[int]) -> engine_pb2.Submission:
    """Return the first submission of a checked request, without what its tenant and the time determine."""
    request, output = admitted.request, admitted.request.output
    submission = engine_pb2.Submission(
        attempt=1,
        prompt_token_ids=token_ids,
        samples=[engine_pb2.SampleState()] * request.sampling.sample_count,
        sampling=request.sampling,
        logit_rules=request.logit_rules,
        beam_search=request.beam_search if request.HasField("beam_search") else None,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        constraint=request.constraint if request.HasField("constraint") else None,
        stopping=_engine_stopping(admitted, len(token_ids)),
        priority=request.priority,
    )
    del submission.logit_rules.bad_words[:]
    return submission


def _truncated(token_ids: list[int], request: gateway_pb2.GenerateRequest, model: ServedModel) -> list[int]:
    """Return the last tokens of a prompt, as many as the request keeps."""
    if not request.HasField("truncate_prompt_tokens"):
        return token_ids
    context = model.description().context_tokens
    check_truncation(request, context)
    most = request.truncate_prompt_tokens
    return token_ids[-(_most_prompt_tokens(request, model) if most == _AS_MANY_AS_FIT else most) :]


def _most_prompt_tokens(request: gateway_pb2.GenerateRequest, model: ServedModel) -> int:
    """Return how many prompt tokens surely fit with max_tokens, at least 1, so that the engine reports the excess."""
    description, stopping = model.description(), request.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else 1
    size = description.block_size
    own_blocks = sequences_of(request).count * (blocks_for(max_tokens, size) + 1) if max_tokens else 0
    return max(1, min(description.context_tokens - max_tokens, (model.request_blocks() - own_blocks) * size))


def _set_times(submission: engine_pb2.Submission, deadline: Deadline, arrival: float) -> None:
    """Set the current age and remaining timeout."""
    submission.age.CopyFrom(duration(deadline.clock() - arrival))
    if (seconds := deadline.seconds_left()) is not None:
        submission.timeout.CopyFrom(duration(seconds))


def _engine_stopping(admitted: AdmittedRequest, prompt_tokens: int) -> decoding_pb2.Stopping:
    """Return what the engine needs of the stopping: stop strings are the gateway's."""
    given = admitted.request.stopping
    max_tokens = given.max_tokens if given.HasField("max_tokens") else _default_max_tokens(admitted, prompt_tokens)
    if admitted.caps_output:
        max_tokens = min(max_tokens, _room(admitted, prompt_tokens))
    return decoding_pb2.Stopping(
        max_tokens=max_tokens,
        min_tokens=given.min_tokens,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
    )


def _room(admitted: AdmittedRequest, prompt_tokens: int) -> int:
    """Return how many tokens fit after the prompt. Raises ContextExceeded if none does."""
    most = _most_tokens(prompt_tokens, sequences_of(admitted.request).count, admitted.model)
    if prompt_tokens >= most:
        message = f"prompt must have at most {most - 1} tokens, not {prompt_tokens}"
        raise ContextExceeded(message, "prompt", prompt_tokens, most)
    return most - prompt_tokens


def _default_max_tokens(admitted: AdmittedRequest, prompt_tokens: int) -> int:
    """Return the model's default, but at least min_tokens, and at most as many as fit; without a default, these."""
    sequences = sequences_of(admitted.request).count
    # At least 1, so that the engine reports the excess.
    fitting = max(1, _most_tokens(prompt_tokens, sequences, admitted.model) - prompt_tokens)
    if not admitted.model_defaults.HasField("max_tokens"):
        return fitting
    return min(fitting, max(admitted.model_defaults.max_tokens, admitted.request.stopping.min_tokens))


def _most_tokens(prompt_tokens: int, sequences: int, model: ServedModel) -> int:
    """Return how many tokens of a sequence, prompt and output together, fit at any engine.

    Sequences share the whole blocks of the prompt. The last generated token needs no slot, because it is not fed back.
    """
    description, request_blocks = model.description(), model.request_blocks()
    shared = min(prompt_tokens // description.block_size, request_blocks)
    slots = (shared + (request_blocks - shared) // sequences) * description.block_size + 1
    return min(description.context_tokens, slots)
