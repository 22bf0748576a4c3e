"""Outputs of requests, written by the engine for its gateways."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from engine.errors import (
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    RequestExists,
    RequestRefused,
    SubmissionFailed,
    UnsupportedField,
)
from engine.schedule.outputs import Scored, Started, Tokens
from engine.schedule.request import FinishReason
from engine.schedule.sequence_group import Group, Sequence
from engine.schedule.step_plan import Sampled
from quire.v1 import decoding_pb2, engine_pb2
from services.wire.duration import duration

_MAX_DETAIL_LENGTH = 1000
_LENGTH_DELIMITED = 2
_TOKENS_TAG = bytes([engine_pb2.StepOutput.TOKENS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED])
# The field with one token: its tag, its length, and an int32, which takes 10 bytes if it is negative.
_MOST_FIELD_BYTES = 12

_REFUSALS = {
    RequestExists: engine_pb2.REFUSAL_REASON_ALREADY_EXISTS,
    InvalidRequest: engine_pb2.REFUSAL_REASON_INVALID,
    UnsupportedField: engine_pb2.REFUSAL_REASON_UNIMPLEMENTED,
    QueueFull: engine_pb2.REFUSAL_REASON_QUEUE_FULL,
    EngineUnavailable: engine_pb2.REFUSAL_REASON_UNAVAILABLE,
    SubmissionFailed: engine_pb2.REFUSAL_REASON_FAILED,
}


def refused_message(submission: engine_pb2.Submission, refused: RequestRefused) -> engine_pb2.RequestRefused:
    """Write the refusal of a submission."""
    return engine_pb2.RequestRefused(
        request_id=submission.request_id,
        attempt=submission.attempt,
        reason=_REFUSALS[type(refused)],
        detail=_detail(str(refused)),
        field=refused.field,
    )


def add_output(
    message: engine_pb2.StepOutput, output: Started | Scored | Tokens, attempt: int, warnings: Iterable[str] = ()
) -> None:
    """Add a live request's output in one step; `warnings` are for its start."""
    if isinstance(output, Tokens):
        _add_tokens(message, output, attempt)
        return
    names = {"request_id": output.request_id, "attempt": attempt}
    match output:
        case Started():
            texts = [_detail(warning) for warning in warnings]
            fields = {"cached_tokens": output.cached_tokens, "isolated": output.isolated, "warnings": texts}
            message.started.add(**names, **fields)
        case Scored():
            message.prompts.add(**names, first_position=output.position, logprobs=_token_logprobs(output.tokens))


class TokenWriter:
    """Writes the tokens of one sample as parts of a StepOutput's bytes: a tenth of the time of a message.

    The parts of one step are merged at once (`merge`). All but the token is the same for each step.
    """

    def __init__(self, request_id: str, attempt: int, sample: int) -> None:
        one = engine_pb2.SampleTokens(request_id=request_id, attempt=attempt, sample=sample).SerializeToString()
        # By the bytes of the field with the token.
        self._heads = [_TOKENS_TAG + _varint(len(one) + length) + one for length in range(_MOST_FIELD_BYTES + 1)]

    def write(self, parts: list[bytes], token_id: int) -> None:
        """Append one token."""
        field = _token_field(token_id)
        parts += (self._heads[len(field)], field)


def merge(message: engine_pb2.StepOutput, parts: list[bytes]) -> None:
    """Move the parts into the message, behind its other tokens."""
    message.MergeFromString(b"".join(parts))
    parts.clear()


@lru_cache(maxsize=65536)
def _token_field(token_id: int) -> bytes:
    return engine_pb2.SampleTokens(token_ids=[token_id]).SerializeToString()


def _varint(number: int) -> bytes:
    """Encode a number as protobuf does: 7 bits a byte, the least significant first."""
    if number < 128:
        return bytes([number])
    return bytes([number & 127 | 128]) + _varint(number >> 7)


def _add_tokens(message: engine_pb2.StepOutput, output: Tokens, attempt: int) -> None:
    """Add tokens, all or nothing: an exception leaves the message as it was."""
    request_id, tokens, sample, end = output
    fields: dict[str, Any] = {}
    if tokens and tokens[0].logprob is not None:
        fields["logprobs"] = _token_logprobs(tokens)
    if end is not None:
        fields["end"] = _sample_end(end)
    token_ids = [token.token_id for token in tokens]
    message.tokens.add(request_id=request_id, attempt=attempt, sample=sample, token_ids=token_ids, **fields)


def _token_logprobs(tokens: list[Sampled]) -> list[decoding_pb2.TokenLogprobs]:
    """Write the log-probabilities of tokens; either all tokens of a request have them, or none."""
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
    """Write the end of a request. Times are those of the engine's clock, in seconds."""
    scheduled = group.stats.scheduled_at if group.stats.scheduled_at is not None else now
    first = group.stats.first_token_at if group.stats.first_token_at is not None else now
    last = group.stats.last_token_at if group.stats.last_token_at is not None else first
    return engine_pb2.RequestFinished(
        request_id=group.request.request_id,
        attempt=attempt,
        samples=map(_sample_end, group.samples),
        queued=duration(scheduled - submitted_at),
        prefill=duration(first - scheduled),
        decode=duration(last - first),
        preemptions=group.stats.preemptions,
        recomputed_tokens=group.stats.recomputed_tokens,
        swapped_tokens=group.stats.swapped_tokens,
        failure=_failure_reason(group),
        detail=_detail(group.detail),
    )


def failed_message(group: Group, attempt: int, detail: str) -> engine_pb2.RequestFinished:
    """Write only that a request failed, because its other outputs could not be written."""
    end = engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_FAILED)
    return engine_pb2.RequestFinished(
        request_id=group.request.request_id,
        attempt=attempt,
        samples=[end] * len(group.request.samples),
        failure=engine_pb2.FAILURE_REASON_REQUEST,
        detail=_detail(detail),
    )


def early_end_message(
    submission: engine_pb2.Submission, reason: FinishReason, queued_seconds: float
) -> engine_pb2.RequestFinished:
    """Write the end of a request that ended before it entered the queue."""
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


def _sample_end(sequence: Sequence) -> engine_pb2.SampleEnd:
    assert sequence.finish is not None, "the sample has ended"
    return engine_pb2.SampleEnd(
        reason=_finish_reason(sequence.finish), stop_token_id=sequence.stop_token, score=sequence.score
    )


def _detail(text: str) -> str:
    """Shorten a text, and replace what UTF-8 cannot encode."""
    return text[:_MAX_DETAIL_LENGTH].encode(errors="replace").decode()


def _finish_reason(reason: FinishReason) -> decoding_pb2.FinishReason.ValueType:
    return decoding_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")


def _failure_reason(group: Group) -> engine_pb2.FailureReason.ValueType:
    if group.failure is None:
        return engine_pb2.FAILURE_REASON_UNSPECIFIED
    return engine_pb2.FailureReason.Value(f"FAILURE_REASON_{group.failure.name}")
