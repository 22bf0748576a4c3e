from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.bad_words import BadWords
from engine.schedule.request import BeamSearch, LogitRules, Request, Sampling, Stopping
from quire.v1 import decoding_pb2, engine_pb2
from services.wire.duration import duration
from services.wire.requests.request import check, request_of

NOW = 1 << 20  # an exact float, as all multiples of 1/512 below
END_OF_TEXT = frozenset((1, 2))
TOKENS = st.integers(-(1 << 31), (1 << 31) - 1)
COUNTS = st.integers(0, 100)
SCORES = st.integers(0, 20) | st.none()
NUMBERS = st.floats(-100, 100)
SHARES = st.floats(1 / 64, 1)
TIMES = st.integers(0, 1 << 20).map(lambda units: units / 512)
SEEDS = st.integers(0, (1 << 63) - 1)
SAMPLING = st.builds(Sampling, SHARES | st.just(0.0), COUNTS, SHARES, SHARES, SEEDS)
GREEDY = st.builds(Sampling, st.just(0.0), seed=SEEDS)
SEARCH = st.builds(BeamSearch, st.integers(1, 128), st.floats(-10, 10), st.booleans())
RULES = st.builds(
    LogitRules,
    *(SHARES, NUMBERS, NUMBERS),
    st.dictionaries(TOKENS, NUMBERS, max_size=3).map(lambda biases: tuple(sorted(biases.items()))),
    st.lists(TOKENS, max_size=3, unique=True).map(tuple),
    st.builds(BadWords, st.lists(st.lists(TOKENS, max_size=3).map(tuple), max_size=3).map(tuple)),
)


@st.composite
def stopping(draw: st.DrawFn) -> Stopping:
    """Stop at the model's end tokens, or ignore them."""
    stops = draw(st.frozensets(st.integers(3, 100), max_size=3))
    ignored = draw(st.sampled_from((frozenset[int](), END_OF_TEXT)))
    limit = draw(st.integers(1, 100))
    return Stopping(limit, stops | (END_OF_TEXT - ignored), draw(st.integers(0, limit)), ignored)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    samples = draw(st.lists(st.lists(TOKENS, max_size=3).map(tuple), min_size=1, max_size=4))
    search = draw(SEARCH | st.none())
    return Request(
        request_id=draw(st.text(st.characters(codec="utf-8"), max_size=20)),
        prompt=tuple(draw(st.lists(TOKENS, max_size=20))),
        sampling=draw(GREEDY if search else SAMPLING),
        stopping=draw(stopping()),
        salt=draw(st.binary(max_size=20)),
        priority=draw(st.integers(-5, 5)),
        arrival=NOW - draw(TIMES),
        samples=tuple(samples),
        deadline=draw(TIMES.map(lambda seconds: NOW + seconds) | st.none()),
        logit_rules=draw(RULES),
        logprobs=None if search else draw(SCORES),
        prompt_logprobs=draw(SCORES),
        beam_search=search,
        ended=draw(st.frozensets(st.integers(0, len(samples) - 1))),
        isolated=draw(st.booleans()),
    )


def submission_of(request: Request) -> engine_pb2.Submission:
    """Write a request as a gateway does."""
    rules = vars(request.logit_rules) | {"logit_bias": dict(request.logit_rules.logit_bias)}
    words = rules.pop("bad_words").sequences
    optional: dict[str, Any] = {}
    if request.beam_search is not None:
        optional["beam_search"] = decoding_pb2.BeamSearch(**vars(request.beam_search))
    if request.deadline is not None:
        optional["timeout"] = duration(request.deadline - NOW)
    return engine_pb2.Submission(
        request_id=request.request_id,
        attempt=1,
        prompt_token_ids=request.prompt,
        samples=[
            engine_pb2.SampleState(generated_token_ids=tokens, ended=index in request.ended)
            for index, tokens in enumerate(request.samples)
        ],
        sampling=decoding_pb2.Sampling(**vars(request.sampling)),
        logit_rules=decoding_pb2.LogitRules(**rules),
        bad_words=[engine_pb2.TokenSequence(token_ids=word) for word in words],
        stopping=decoding_pb2.Stopping(
            max_tokens=request.stopping.max_tokens,
            min_tokens=request.stopping.min_tokens,
            stop_token_ids=request.stopping.token_ids - END_OF_TEXT,
            ignore_eos=bool(request.stopping.ignored_token_ids),
        ),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        salt=request.salt,
        priority=request.priority,
        age=duration(NOW - request.arrival),
        isolated=request.isolated,
        **optional,
    )


@given(requests())
def test_a_request_round_trips_in_a_submission(request: Request) -> None:
    submission = engine_pb2.Submission.FromString(submission_of(request).SerializeToString())
    check(submission)
    read = request_of(submission, END_OF_TEXT, NOW)
    biases = tuple(sorted(read.logit_rules.logit_bias))  # unordered on the wire
    assert replace(read, logit_rules=replace(read.logit_rules, logit_bias=biases)) == request
