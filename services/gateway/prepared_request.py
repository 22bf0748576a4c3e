"""A request ready for submission: checked against its model, tokenized, with its limits filled in."""

from collections.abc import Collection
from dataclasses import dataclass

from blocks import blocks_for
from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.gateway.access.token_bound import sequences_of
from services.gateway.deadlines import Deadline
from services.gateway.fleet.fleet import ServedModel
from services.gateway.observe.observer import RequestProgress
from services.gateway.parameters import Parameters, check_truncation
from services.runtime.errors import InvalidField
from services.runtime.tracing.spans import NO_SPAN, Span
from services.wire.duration import duration

_AS_MANY_AS_FIT = -1


@dataclass(frozen=True)
class PreparedRequest:
    """The first submission and the state of its generation. `arrival` is in seconds."""

    model: ServedModel
    parameters: Parameters
    submission: engine_pb2.Submission
    arrival: float
    deadline: Deadline
    progress: RequestProgress
    span: Span = NO_SPAN

    def token_upper_bound(self) -> int:
        """Return an upper bound of its tokens, prompt and samples together."""
        sequences = max(len(self.submission.samples), self.submission.beam_search.width)
        # The engine refuses a larger max_tokens; until then it must not make the gateway reject other requests.
        sample_tokens = min(self.submission.stopping.max_tokens, self.model.description().context_tokens)
        return len(self.submission.prompt_token_ids) + sequences * sample_tokens

    def resumption(self, samples: Collection[engine_pb2.SampleState], *, isolated: bool) -> engine_pb2.Submission:
        """Return a submission that resumes from these samples at another engine."""
        submission = engine_pb2.Submission()
        submission.CopyFrom(self.submission)
        submission.attempt = self.progress.attempts + 1
        submission.isolated = isolated
        set_times(submission, self.deadline, self.arrival)
        del submission.samples[:]
        submission.samples.extend(samples)
        return submission


def submission_of(
    parameters: Parameters, token_ids: list[int], model: ServedModel, request_id: str, salt: bytes
) -> engine_pb2.Submission:
    """Return the first submission, without its times and bad words."""
    rules = decoding_pb2.LogitRules()
    rules.CopyFrom(parameters.logit_rules)
    del rules.bad_words[:]
    return engine_pb2.Submission(
        request_id=request_id,
        attempt=1,
        prompt_token_ids=token_ids,
        samples=[engine_pb2.SampleState()] * parameters.sampling.sample_count,
        sampling=parameters.sampling,
        logit_rules=rules,
        beam_search=parameters.beam_search,
        logprobs=parameters.logprobs,
        prompt_logprobs=parameters.prompt_logprobs,
        constraint=parameters.constraint,
        stopping=_engine_stopping(parameters, len(token_ids), model),
        salt=salt,
        priority=parameters.priority,
    )


def truncated(token_ids: list[int], request: gateway_pb2.GenerateRequest, model: ServedModel) -> list[int]:
    """Return the last tokens of a prompt, as many as the request keeps."""
    if not request.HasField("truncate_prompt_tokens"):
        return token_ids
    context = model.description().context_tokens
    check_truncation(request, context)
    most = request.truncate_prompt_tokens
    return token_ids[-(_most_prompt_tokens(request, model) if most == _AS_MANY_AS_FIT else most) :]


def _most_prompt_tokens(request: gateway_pb2.GenerateRequest, model: ServedModel) -> int:
    """Return how many prompt tokens surely fit with max_tokens, at least 1, so that the engine reports the excess."""
    description, max_tokens = model.description(), max(1, request.stopping.max_tokens)
    size = description.block_size
    own_blocks = sequences_of(request).count * (blocks_for(max_tokens, size) + 1)
    return max(1, min(description.context_tokens - max_tokens, (model.request_blocks() - own_blocks) * size))


def set_times(submission: engine_pb2.Submission, deadline: Deadline, arrival: float) -> None:
    """Set the current age and remaining timeout."""
    submission.age.CopyFrom(duration(deadline.clock() - arrival))
    if (seconds := deadline.seconds_left()) is not None:
        submission.timeout.CopyFrom(duration(seconds))


def _engine_stopping(parameters: Parameters, prompt_tokens: int, model: ServedModel) -> decoding_pb2.Stopping:
    rules, max_tokens = parameters.stopping, parameters.stopping.max_tokens
    if max_tokens is None:
        search = parameters.beam_search
        sequences = search.width if search else parameters.sampling.sample_count
        max_tokens = _default_max_tokens(prompt_tokens, sequences, model)
    return decoding_pb2.Stopping(
        max_tokens=max_tokens,
        min_tokens=rules.min_tokens,
        stop_token_ids=rules.token_ids,
        ignore_eos=rules.ignore_eos,
    )


def _default_max_tokens(prompt_tokens: int, sequences: int, model: ServedModel) -> int:
    """Return how many tokens fit after the prompt at any engine; at least 1, so that the engine reports the excess.

    Sequences share the whole blocks of the prompt. The last generated token needs no slot, because it is not fed back.
    """
    description, request_blocks = model.description(), model.request_blocks()
    shared = min(prompt_tokens // description.block_size, request_blocks)
    slots = (shared + (request_blocks - shared) // sequences) * description.block_size + 1
    return max(1, min(description.context_tokens, slots) - prompt_tokens)


def check_vocabulary(parameters: Parameters, vocabulary_size: int) -> None:
    """Raise InvalidField for a token id in the parameters that is outside the vocabulary."""
    rules = parameters.logit_rules
    check_ids(parameters.stopping.token_ids, "stopping.stop_token_ids", vocabulary_size)
    check_ids(rules.allowed_token_ids, "logit_rules.allowed_token_ids", vocabulary_size)
    for token in sorted(rules.logit_bias):
        _check_id(token, f"logit_rules.logit_bias[{token}]", vocabulary_size)


def check_fits(count: int, field: str, model: ServedModel) -> None:
    """Raise InvalidField if there are more tokens than the model's context."""
    context = model.description().context_tokens
    if count > context:
        raise InvalidField(f"{field} must have at most {context} tokens, the model's context, not {count}", field)


def check_ids(token_ids: Collection[int], field: str, vocabulary_size: int) -> None:
    """Raise InvalidField for the first token id outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary_size):
        return  # ten times faster than the loop
    for position, token in enumerate(token_ids):
        _check_id(token, f"{field}[{position}]", vocabulary_size)


def _check_id(token: int, field: str, vocabulary_size: int) -> None:
    if not 0 <= token < vocabulary_size:
        raise InvalidField(f"{field} must be a token id between 0 and {vocabulary_size - 1}, not {token}", field)
