"""Between the engine's requests and outputs and the wire of its gateways."""

from engine.constraint import Constraint
from engine.errors import (
    EngineUnavailable,
    FieldUnserved,
    InvalidRequest,
    QueueFull,
    RequestExists,
    RequestRefused,
    SubmissionFailed,
)
from engine.schedule.request import BeamSearch, FinishReason, LogitRules, Request, Sampling, Stopping
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import Sampled
from quire.v1 import decoding_pb2, engine_pb2
from services.wire.duration import MOST_SECONDS, duration, seconds_of

# More samples of one prompt no gateway lets in.
_MOST_SAMPLES = 128
_LONGEST_DETAIL = 1000

_REFUSALS = {
    RequestExists: engine_pb2.REFUSAL_REASON_ALREADY_EXISTS,
    InvalidRequest: engine_pb2.REFUSAL_REASON_INVALID,
    FieldUnserved: engine_pb2.REFUSAL_REASON_UNIMPLEMENTED,
    QueueFull: engine_pb2.REFUSAL_REASON_QUEUE_FULL,
    EngineUnavailable: engine_pb2.REFUSAL_REASON_UNAVAILABLE,
    SubmissionFailed: engine_pb2.REFUSAL_REASON_FAILED,
}


def check(submission: engine_pb2.Submission) -> None:
    """Check what is looked at before the request is made of it. Raises InvalidRequest."""
    count = max(submission.sampling.sample_count, len(submission.samples))
    if submission.sampling.sample_count < 0 or count > _MOST_SAMPLES:
        given = submission.sampling.sample_count if submission.sampling.sample_count < 0 else count
        raise InvalidRequest(
            f"sampling.sample_count is {given}, it must be from 1 to {_MOST_SAMPLES}", "sampling.sample_count"
        )
    for name in ("age", "timeout"):
        seconds, least = seconds_of(getattr(submission, name)), 0 if name == "age" else -MOST_SECONDS
        if not least <= seconds <= MOST_SECONDS:
            raise InvalidRequest(f"{name} is {seconds:g} s, it must be from {least} to {MOST_SECONDS}", name)


def request_of(
    submission: engine_pb2.Submission, eos_token_ids: frozenset[int], now: float, constraint: Constraint | None = None
) -> Request:
    """Read a submission that is checked, and whose constraint is compiled. `now` is the engine's clock, in seconds."""
    sampling = submission.sampling
    samples = tuple(tuple(sample.generated_token_ids) for sample in submission.samples)
    missing = max(1, sampling.sample_count) - len(samples)
    return Request(
        request_id=submission.request_id,
        prompt=tuple(submission.prompt_token_ids),
        sampling=_sampling(sampling),
        stopping=_stopping(submission.stopping, eos_token_ids),
        salt=submission.salt,
        priority=submission.priority,
        arrival=now - seconds_of(submission.age),
        samples=samples + ((),) * missing,
        deadline=now + seconds_of(submission.timeout) if submission.HasField("timeout") else None,
        logit_rules=_logit_rules(submission.logit_rules),
        logprobs=submission.logprobs if submission.HasField("logprobs") else None,
        prompt_logprobs=submission.prompt_logprobs if submission.HasField("prompt_logprobs") else None,
        beam_search=_beam_search(submission.beam_search) if submission.HasField("beam_search") else None,
        constraint=constraint,
        ended=frozenset(index for index, sample in enumerate(submission.samples) if sample.ended),
        isolated=submission.isolated,
    )


def _sampling(given: decoding_pb2.Sampling) -> Sampling:
    return Sampling(
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_k=given.top_k,
        top_p=given.top_p if given.HasField("top_p") else 1.0,
        min_p=given.min_p,
        seed=given.seed,
    )


def _beam_search(given: decoding_pb2.BeamSearch) -> BeamSearch:
    return BeamSearch(
        width=given.width if given.HasField("width") else 1,
        length_penalty=given.length_penalty if given.HasField("length_penalty") else 1.0,
        early_stopping=given.early_stopping,
    )


def _stopping(given: decoding_pb2.Stopping, eos_token_ids: frozenset[int]) -> Stopping:
    stops, none = frozenset(given.stop_token_ids), frozenset[int]()
    ends, ignored = (none, eos_token_ids) if given.ignore_eos else (eos_token_ids, none)
    return Stopping(given.max_tokens, stops | ends, given.min_tokens, ignored)


def _logit_rules(given: decoding_pb2.LogitRules) -> LogitRules:
    return LogitRules(
        repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        logit_bias=tuple(given.logit_bias.items()),
        allowed_token_ids=tuple(dict.fromkeys(given.allowed_token_ids)),
    )


def refused_message(submission: engine_pb2.Submission, refused: RequestRefused) -> engine_pb2.RequestRefused:
    """Write why a submission was not taken."""
    return engine_pb2.RequestRefused(
        request_id=submission.request_id,
        attempt=submission.attempt,
        reason=_REFUSALS[type(refused)],
        detail=_words(str(refused)),
        field=refused.field,
    )


def token_logprobs(tokens: list[Sampled]) -> list[decoding_pb2.TokenLogprobs]:
    """Write the log-probabilities of those tokens that have any: all of a request's, or none."""
    return [
        decoding_pb2.TokenLogprobs(
            logprob=token.logprob,
            top_token_ids=[token_id for token_id, _ in token.top],
            top_logprobs=[logprob for _, logprob in token.top],
        )
        for token in tokens
        if token.logprob is not None
    ]


def finished_message(group: Group, attempt: int, submitted_at: float, now: float) -> engine_pb2.RequestFinished:
    """Write how a request ended. Times are those of the engine's clock, in seconds."""
    scheduled = group.scheduled_at if group.scheduled_at is not None else now
    first = group.first_token_at if group.first_token_at is not None else now
    last = group.last_token_at if group.last_token_at is not None else first
    return engine_pb2.RequestFinished(
        request_id=group.request.request_id,
        attempt=attempt,
        samples=map(sample_end, group.samples),
        queued=duration(scheduled - submitted_at),
        prefill=duration(first - scheduled),
        decode=duration(last - first),
        preemptions=group.preemptions,
        recomputed_tokens=group.recomputed_tokens,
        swapped_tokens=group.swapped_tokens,
        failure=_failure_reason(group),
        detail=_words(group.detail),
    )


def failed_message(group: Group, attempt: int, detail: str) -> engine_pb2.RequestFinished:
    """Write that a request failed, and nothing else of it: what it brought could not be written."""
    end = engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_FAILED)
    return engine_pb2.RequestFinished(
        request_id=group.request.request_id,
        attempt=attempt,
        samples=[end] * len(group.request.samples),
        failure=engine_pb2.FAILURE_REASON_REQUEST,
        detail=_words(detail),
    )


def unbegun_message(
    submission: engine_pb2.Submission, reason: FinishReason, queued_seconds: float
) -> engine_pb2.RequestFinished:
    """Write that a request ended before it came to the queue."""
    samples = max(1, submission.sampling.sample_count, len(submission.samples))
    reasons = [_finish_reason(reason)] * samples
    for index, sample in enumerate(submission.samples):
        if sample.ended:
            reasons[index] = decoding_pb2.FINISH_REASON_STOP
    return engine_pb2.RequestFinished(
        request_id=submission.request_id,
        attempt=submission.attempt,
        samples=[engine_pb2.SampleEnd(reason=one) for one in reasons],
        queued=duration(queued_seconds),
    )


def sample_end(sequence: Sequence) -> engine_pb2.SampleEnd:
    """Write how a sample ended."""
    assert sequence.finish is not None, "the sample has ended"
    return engine_pb2.SampleEnd(
        reason=_finish_reason(sequence.finish), stop_token_id=sequence.stop_token, score=sequence.score
    )


def _words(text: str) -> str:
    """Return a text that the wire takes, whatever an exception said."""
    return text[:_LONGEST_DETAIL].encode(errors="replace").decode()


def _finish_reason(reason: FinishReason) -> decoding_pb2.FinishReason.ValueType:
    return decoding_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")


def _failure_reason(group: Group) -> engine_pb2.FailureReason.ValueType:
    if group.failure is None:
        return engine_pb2.FAILURE_REASON_UNSPECIFIED
    return engine_pb2.FailureReason.Value(f"FAILURE_REASON_{group.failure.name}")
