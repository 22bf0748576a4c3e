"""Round trips of an engine's messages about requests, to the gateway's reader."""

from itertools import count, pairwise

from hypothesis import given
from hypothesis import strategies as st

from engine.errors import EngineUnavailable, InvalidRequest, QueueFull, RequestExists, RequestRefused, UnsupportedField
from engine.schedule.outputs import Scored, Started, Tokens
from engine.schedule.request import Failure, FinishReason, Request, Sampling, Stopping
from engine.schedule.sequence_group import Group
from engine.schedule.step_plan import Sampled
from quire.v1 import decoding_pb2, engine_pb2
from services.gateway.fleet.engine_events import EventBatch
from services.wire.duration import seconds_of
from services.wire.requests.output import TokenWriter, add_output, finished_message, merge, refused_message

TOKENS = st.integers(0, (1 << 31) - 1)
LOGPROBS = st.floats(-1000, 0, width=32)
SAMPLED = st.builds(Sampled, TOKENS, LOGPROBS, st.lists(st.tuples(TOKENS, LOGPROBS), max_size=3).map(tuple), st.none())
NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
TIMES = st.integers(0, 1 << 20).map(lambda units: units / 512)
REFUSALS = (EngineUnavailable, UnsupportedField, InvalidRequest, QueueFull, RequestExists)


@given(NAMES, st.integers(0, 1 << 20), st.integers(0, 200), st.lists(TOKENS, min_size=1, max_size=3))
def test_tokens_written_as_bytes_are_those_of_a_message(
    request_id: str, attempt: int, sample: int, token_ids: list[int]
) -> None:
    as_messages, as_bytes, parts = engine_pb2.StepOutput(), engine_pb2.StepOutput(), list[bytes]()
    writer = TokenWriter(request_id, attempt, sample)
    for token_id in token_ids:
        add_output(as_messages, Tokens(request_id, [Sampled(token_id)], sample), attempt)
        writer.write(parts, token_id)
    merge(as_bytes, parts)
    assert as_bytes == as_messages
    assert not parts


@given(st.lists(SAMPLED, max_size=4))
def test_tokens_with_log_probabilities_round_trip(tokens: list[Sampled]) -> None:
    written = engine_pb2.StepOutput()
    add_output(written, Tokens("request", tokens, sample=2), attempt=3)
    read = engine_pb2.StepOutput.FromString(written.SerializeToString())
    assert [(one.request_id, one.attempt) for one in read.tokens] == [("request", 3)]
    received = EventBatch.of(read.tokens).tokens[2]
    tops = [tuple(zip(one.top_token_ids, one.top_logprobs, strict=True)) for one in received.logprobs]
    logprobs = [one.logprob for one in received.logprobs]
    assert list(map(Sampled, received.token_ids, logprobs, tops)) == tokens


@given(st.lists(SAMPLED, max_size=4), TOKENS, st.booleans())
def test_a_start_and_a_prompts_log_probabilities_round_trip(tokens: list[Sampled], number: int, isolated: bool) -> None:
    written = engine_pb2.StepOutput()
    add_output(written, Started("request", number, isolated), 3, warnings=["left out"])
    add_output(written, Scored("request", number, tokens), attempt=3)
    read = engine_pb2.StepOutput.FromString(written.SerializeToString())
    batch = EventBatch.of([*read.started, *read.prompts])
    assert batch.started == engine_pb2.RequestStarted(
        request_id="request", attempt=3, cached_tokens=number, isolated=isolated, warnings=["left out"]
    )
    (prompt,) = batch.prompts
    assert (prompt.request_id, prompt.attempt, prompt.first_position) == ("request", 3, number)
    assert [one.logprob for one in prompt.logprobs] == [token.logprob for token in tokens]


@given(st.sampled_from(REFUSALS), NAMES, st.text(max_size=1000), NAMES)
def test_a_refusal_round_trips(kind: type[RequestRefused], request_id: str, message: str, field: str) -> None:
    submission = engine_pb2.Submission(request_id=request_id, attempt=3)
    data = refused_message(submission, kind(message, field)).SerializeToString()
    refused = EventBatch.of([engine_pb2.RequestRefused.FromString(data)]).refused
    assert refused is not None
    assert (refused.request_id, refused.attempt, refused.field) == (request_id, 3, field)
    assert refused.detail == message.encode(errors="replace").decode()


@given(
    st.sampled_from([reason for reason in FinishReason if reason is not FinishReason.PRUNED]),
    TOKENS | st.none(),
    st.floats(allow_nan=False) | st.none(),
    st.sampled_from(Failure) | st.none(),
    st.lists(TIMES, min_size=5, max_size=5).map(sorted),
    st.lists(TOKENS, min_size=2, max_size=2),
)
def test_the_end_of_a_request_round_trips(
    reason: FinishReason,
    stop_token: int | None,
    score: float | None,
    failure: Failure | None,
    times: list[float],
    totals: list[int],
) -> None:
    group = Group.of(Request("request", (1,), Sampling(), Stopping(1)), count(1))
    sample = group.samples[0]
    sample.finish, sample.stop_token, sample.score, group.failure = reason, stop_token, score, failure
    group.stats.recomputed_tokens, group.stats.swapped_tokens = totals
    submitted, group.stats.scheduled_at, group.stats.first_token_at, group.stats.last_token_at, now = times
    data = finished_message(group, 2, submitted, now).SerializeToString()
    finished = EventBatch.of([engine_pb2.RequestFinished.FromString(data)]).finished
    assert finished is not None
    (end,) = finished.samples
    assert decoding_pb2.FinishReason.Name(end.reason) == f"FINISH_REASON_{reason.name}"
    assert (end.stop_token_id if end.HasField("stop_token_id") else None) == stop_token
    assert (end.score if end.HasField("score") else None) == score
    name = failure.name if failure else "UNSPECIFIED"
    assert engine_pb2.FailureReason.Name(finished.failure) == f"FAILURE_REASON_{name}"
    assert [finished.recomputed_tokens, finished.swapped_tokens] == totals
    durations = [seconds_of(one) for one in (finished.queued, finished.prefill, finished.decode)]
    assert durations == [later - earlier for earlier, later in pairwise(times[:4])]
