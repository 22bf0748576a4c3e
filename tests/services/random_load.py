"""Short random requests of every kind for a running gateway, and their allowed outcomes.

The same number makes the same call in every run. A new way of decoding gets a function in `_KINDS`, a new refusal a
line in `_FAULTS`.
"""

import random
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf.duration_pb2 import Duration

from quire.v1 import decoding_pb2, gateway_pb2, kvmanager_pb2
from services.runtime.errors import FIELD_METADATA
from tests.faults import wait_until
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, start_quire
from tests.scrape import Scrape
from tests.tiny_models import VOCABULARY

Request = gateway_pb2.GenerateRequest
Code = grpc.StatusCode
Make = Callable[[Request, random.Random], None]

AT_A_TIME = 24
COMPARED = 60  # calls whose answers are compared with those alone
LONGEST_PROMPT = 56
MOST_TOKENS = 20
# Some sequences grow, and cause preemptions; the pool holds four times as many tokens.
GROWING_PROMPT = 16
GROWING_TOKENS = 40
# Of each tier. Small blocks cause more preemptions.
BLOCKS = 64
BLOCK_SIZE = 4
_LETTERS = "etaoin shrdlu, the quick brown fox; Größe 北京 🙂"
_NO_NUMBER = float("nan")


@dataclass(frozen=True)
class Errand:
    """A request and its client, which may cancel after some messages or set a deadline.

    `refused_for` names the field that the gateway blames; it is empty for a valid request.
    """

    number: int
    kind: str
    request: Request
    refused_for: str = ""
    refusal: Code = Code.INVALID_ARGUMENT
    cancel_after: int | None = None
    seconds: float | None = None

    @property
    def right_codes(self) -> Collection[Code]:
        if self.refused_for:
            return {self.refusal}
        if self.cancel_after is not None:
            return {Code.CANCELLED, Code.OK}  # it may end earlier
        if self.seconds is not None or self.request.HasField("timeout"):
            return {Code.DEADLINE_EXCEEDED, Code.OK}
        return {Code.OK}


@dataclass
class Outcomes:
    ends: Counter[tuple[str, Code]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    preempted: Counter[str] = field(default_factory=Counter)  # by the kind of request
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)  # of the first calls that succeeded
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, errand: Errand, code: Code, answer: Answer, faults: Iterable[str]) -> None:
        with self._lock:
            if errand.number < COMPARED and code is Code.OK:
                self.tokens[errand.number] = tokens_by_sample(answer)
            self.ends[errand.kind, code] += 1
            if answer.finished.timing.preemptions:
                self.preempted[errand.kind.partition(",")[0]] += 1
            self.faults += (f"{errand.kind}: {fault}\n{errand.request}" for fault in faults)

    def by_kind(self) -> dict[str, int]:
        kinds: Counter[str] = Counter()
        for (kind, _), count in self.ends.items():
            kinds[kind.partition(",")[0]] += count
        return dict(kinds)

    def by_code(self) -> dict[str, int]:
        codes: Counter[str] = Counter()
        for (_, code), count in self.ends.items():
            codes[code.name] += count
        return dict(codes)


def errand(number: int) -> Errand:
    """Make the call of this number: three in four succeed, the others are refused or cancelled."""
    draw = random.Random(number)
    request = _plain(draw)
    kind, make = draw.choice(_KINDS)
    make(request, draw)
    match draw.randrange(20):
        case 0 | 1:
            invalidate, refused_for, refusal = draw.choice(_FAULTS)
            invalid = _plain(draw)
            invalidate(invalid)
            return Errand(number, "refused", invalid, refused_for, refusal)
        case 2:
            return Errand(number, f"{kind}, cancelled", request, cancel_after=draw.randrange(8))
        case 3:
            return Errand(number, f"{kind}, deadline", request, seconds=draw.uniform(0.002, 0.5))
        case 4:
            request.timeout.CopyFrom(Duration(nanos=draw.randrange(2_000_000, 500_000_000)))
            return Errand(number, f"{kind}, timeout", request)
    return Errand(number, kind, request)


def run_errands(quire: RunningQuire, numbers: Iterable[int], outcomes: Outcomes, at_a_time: int = AT_A_TIME) -> None:
    with ThreadPoolExecutor(at_a_time) as clients:
        list(clients.map(lambda number: _run(quire, errand(number), outcomes), numbers))


def check_against_those_alone(quire: RunningQuire, outcomes: Outcomes) -> None:
    assert len(outcomes.tokens) > COMPARED // 2
    for number, tokens in outcomes.tokens.items():
        request = errand(number).request
        request.ClearField("timeout")
        assert tokens_by_sample(quire.generate(request)) == tokens


def tokens_by_sample(answer: Answer) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in answer.finished.samples]
    for delta in answer.deltas:
        tokens[delta.sample] += delta.token_ids
    return tokens


# Clients


def _run(quire: RunningQuire, errand: Errand, outcomes: Outcomes) -> None:
    call = quire.gateway.Generate(errand.request, timeout=errand.seconds or CALL_SECONDS)
    answer, code = Answer(), Code.OK
    faults: list[str] = []
    try:
        for count, response in enumerate(call):
            if count == errand.cancel_after:
                call.cancel()
            answer.add(response)
    except grpc.RpcError as error:
        code = error.code()
        faults += _refusal_faults(errand, code, error)
    else:
        faults += _answer_faults(errand, answer)
    if code not in errand.right_codes:
        faults.append(f"ended with {code}, expected {errand.right_codes}: {call.details()}")
    outcomes.add(errand, code, answer, faults)


def _refusal_faults(errand: Errand, code: Code, error: grpc.RpcError) -> list[str]:
    blamed = next((one.value for one in error.trailing_metadata() or () if one.key == FIELD_METADATA), "")
    if errand.refused_for and blamed != errand.refused_for:
        return [f"{blamed!r} was blamed instead of {errand.refused_for!r}: {error.details()}"]
    if code is Code.DEADLINE_EXCEEDED and blamed not in ("", "timeout"):
        return [f"{blamed!r} was blamed for a deadline"]
    return []


def _answer_faults(errand: Errand, answer: Answer) -> list[str]:
    request, samples = errand.request, answer.finished.samples
    tokens = tokens_by_sample(answer)
    least, most = request.stopping.min_tokens, request.stopping.max_tokens
    allowed = set(request.logit_rules.allowed_token_ids)
    generated = sum(map(len, tokens))
    checks = {
        "Started comes once, first": answer.events.count("started") == 1 and answer.events[0] == "started",
        "Finished comes once, last": answer.events.count("finished") == 1 and answer.events[-1] == "finished",
        "the number of samples is sample_count": len(samples) == answer.started.sampling.sample_count,
        "each sample has a reason": all(one.reason in _ENDS for one in samples),
        "token counts are within min_tokens and max_tokens": all(least <= len(one) <= most for one in tokens),
        "a sample that ended at the limit has max_tokens": all(
            len(one) == most
            for one, end in zip(tokens, samples, strict=True)
            if end.reason == decoding_pb2.FINISH_REASON_LENGTH and not end.HasField("score")
        ),
        "only allowed tokens were chosen": not allowed or all(allowed.issuperset(one) for one in tokens),
        "each token has its log-probabilities": len(answer.logprobs) == generated * request.output.HasField("logprobs"),
        "each prompt token but the first has its log-probabilities": len(answer.prompt_logprobs)
        == (answer.started.prompt_tokens - 1) * request.output.HasField("prompt_logprobs"),
        "answers of a search are sorted by score": not request.HasField("beam_search") or _best_first(answer),
        "all tokens were counted": answer.finished.usage.generated_tokens == generated,
    }
    return [f"not true: {check}" for check, holds in checks.items() if not holds]


_ENDS = (decoding_pb2.FINISH_REASON_STOP, decoding_pb2.FINISH_REASON_LENGTH)


def _best_first(answer: Answer) -> bool:
    """Return True if the answers are sorted by score, with missing ones last."""
    samples = answer.finished.samples
    scores = [one.score for one in samples if one.HasField("score")]
    return scores == sorted(scores, reverse=True) and all(one.HasField("score") for one in samples[: len(scores)])


# Requests


def _plain(draw: random.Random) -> Request:
    """Make a request with a shared prefix and a short answer."""
    request = Request()
    request.sampling.temperature = 0
    grows = draw.random() < 0.3
    length = draw.randint(1, GROWING_PROMPT if grows else LONGEST_PROMPT)
    if draw.random() < 0.3:
        request.prompt.text = "".join(draw.choices(_LETTERS, k=length // 2 + 1))
    else:
        common = random.Random(draw.randrange(6))
        shared = min(length, draw.choice((0, 16, 35)))
        own = [draw.randrange(2, VOCABULARY) for _ in range(length - shared)]
        request.prompt.token_ids.ids.extend([*(common.randrange(2, VOCABULARY) for _ in range(shared)), *own])
    request.stopping.max_tokens = draw.randint(MOST_TOKENS, GROWING_TOKENS) if grows else draw.randint(1, MOST_TOKENS)
    request.stopping.ignore_eos = draw.random() < 0.5
    request.priority = draw.choice((0, 0, 0, -1, 1, 2))
    request.cache.salt = draw.choice(("", "", "", "another"))
    return request


def _greedy(request: Request, draw: random.Random) -> None:
    """Change nothing."""


def _sampled(request: Request, draw: random.Random) -> None:
    request.sampling.temperature = draw.choice((0.5, 1, 3))
    request.sampling.seed = draw.getrandbits(40)
    request.sampling.top_k = draw.choice((0, 1, 40))
    request.sampling.top_p = draw.choice((1, 0.9, 0.3))
    request.sampling.min_p = draw.choice((0, 0.1))


def _samples(request: Request, draw: random.Random) -> None:
    _sampled(request, draw)
    request.sampling.sample_count = draw.randint(2, 4)


def _beams(request: Request, draw: random.Random) -> None:
    request.beam_search.width = draw.randint(2, 4)
    request.beam_search.length_penalty = draw.choice((0, 1, 2))
    request.beam_search.early_stopping = draw.random() < 0.5
    request.sampling.sample_count = draw.randint(1, request.beam_search.width)
    request.stopping.stop_token_ids.extend(range(40, 40 + draw.choice((0, 10))))


def _rules(request: Request, draw: random.Random) -> None:
    if draw.random() < 0.5:
        _sampled(request, draw)
    rules = request.logit_rules
    rules.repetition_penalty = draw.choice((1, 1.3, 2))
    rules.presence_penalty = draw.choice((0, 1.5))
    rules.frequency_penalty = draw.choice((0, 0.7))
    rules.logit_bias[draw.randrange(VOCABULARY)] = draw.choice((-5, 5))
    rules.allowed_token_ids.extend(draw.sample(range(VOCABULARY), 50) * draw.randrange(2))
    rules.bad_words.extend(draw.sample(_LETTERS, 3) * draw.randrange(2))
    request.stopping.min_tokens = draw.randint(0, request.stopping.max_tokens)


def _logprobs(request: Request, draw: random.Random) -> None:
    request.output.logprobs = draw.choice((0, 1, 5, 20))
    if draw.random() < 0.5:
        request.output.prompt_logprobs = draw.choice((0, 1, 5, 20))


def _prompt_alone(request: Request, draw: random.Random) -> None:
    request.stopping.max_tokens = 0
    request.sampling.sample_count = draw.randint(1, 3)
    if draw.random() < 0.7:
        request.output.prompt_logprobs = draw.choice((0, 1, 5, 20))


def _stop_strings(request: Request, draw: random.Random) -> None:
    _sampled(request, draw)
    request.sampling.sample_count = draw.randint(1, 3)
    request.stopping.stop_strings.extend(draw.sample(_LETTERS.replace(" ", ""), 12))
    request.stopping.include_stop = draw.random() < 0.5


def _constrained(request: Request, draw: random.Random) -> None:
    draw.choice((_greedy, _sampled, _samples, _beams))(request, draw)
    request.stopping.ignore_eos = False
    if draw.random() < 0.5:
        request.constraint.regex = draw.choice(("[a-z]{1,12}( [a-z]{1,5}){0,3}", "(yes|no)+", "x{30}"))
    else:
        request.constraint.json_schema = draw.choice(_SCHEMAS)


_SCHEMAS = (
    '{"type": "array", "items": {"type": "integer"}}',
    '{"enum": ["north", "south", 7]}',
    '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": false}',
)
_KINDS: tuple[tuple[str, Make], ...] = (
    ("greedy", _greedy),
    ("sampled", _sampled),
    ("samples", _samples),
    ("beams", _beams),
    ("rules", _rules),
    ("logprobs", _logprobs),
    ("prompt alone", _prompt_alone),
    ("stop strings", _stop_strings),
    ("constrained", _constrained),
)
KINDS = frozenset(kind for kind, _ in _KINDS)


def _change(**fields: object) -> Callable[[Request], None]:
    return lambda request: request.MergeFrom(Request(**fields))  # type: ignore[arg-type]


def _unknown_token(request: Request) -> None:
    request.prompt.token_ids.ids[:] = [VOCABULARY]


_INVALID = Code.INVALID_ARGUMENT
_FAULTS: tuple[tuple[Callable[[Request], None], str, Code], ...] = (
    (lambda request: request.ClearField("prompt"), "prompt", _INVALID),
    (_unknown_token, "prompt.token_ids.ids[0]", _INVALID),
    (_change(model="another"), "model", Code.NOT_FOUND),
    (_change(request_id="x" * 129), "request_id", _INVALID),
    (_change(sampling={"temperature": -1}), "sampling.temperature", _INVALID),
    (_change(sampling={"top_p": 0}), "sampling.top_p", _INVALID),
    (_change(sampling={"sample_count": 0}), "sampling.sample_count", _INVALID),
    (_change(sampling={"sample_count": 100}), "sampling.sample_count", _INVALID),
    (_change(beam_search={"width": 0}), "beam_search.width", _INVALID),
    (_change(beam_search={"width": 2}, output={"logprobs": 1}), "output.logprobs", _INVALID),
    (_change(beam_search={"width": 2}, stopping={"stop_strings": ["x"]}), "stopping.stop_strings", _INVALID),
    (_change(logit_rules={"repetition_penalty": 0}), "logit_rules.repetition_penalty", _INVALID),
    (_change(logit_rules={"presence_penalty": _NO_NUMBER}), "logit_rules.presence_penalty", _INVALID),
    (_change(stopping={"max_tokens": -1}), "stopping.max_tokens", _INVALID),
    (_change(beam_search={"width": 2}, stopping={"max_tokens": 0}), "stopping.max_tokens", _INVALID),
    (_change(stopping={"max_tokens": 390}), "stopping.max_tokens", _INVALID),
    (_change(stopping={"min_tokens": GROWING_TOKENS + 1}), "stopping.min_tokens", _INVALID),
    (_change(stopping={"stop_strings": [""]}), "stopping.stop_strings[0]", _INVALID),
    (_change(output={"logprobs": 21}), "output.logprobs", _INVALID),
    (_change(constraint={"regex": "(a"}, stopping={"ignore_eos": False}), "constraint.regex", _INVALID),
    (
        _change(constraint={"regex": "(x{1000}){1000}{1000}"}, stopping={"ignore_eos": False}),
        "constraint.regex",
        _INVALID,
    ),
    (
        _change(constraint={"json_schema": '{"type": 1}'}, stopping={"ignore_eos": False}),
        "constraint.json_schema",
        _INVALID,
    ),
    (_change(timeout={"seconds": -1}), "timeout", _INVALID),
)


# The services


def start_in_a_tiny_pool(model: Path) -> RunningQuire:
    """Start the three services with tiers of 256 tokens: about eight calls fit at a time."""
    return start_quire(
        *("--model", str(model), "--block-size", str(BLOCK_SIZE), "--max-sequences", "24", "--threads", "1"),
        *("--device-blocks", str(BLOCKS), "--host-blocks", str(BLOCKS), "--preemption", "auto"),
    )


def events_so_far(quire: RunningQuire) -> int:
    """Return the count of events in the KV manager's ledger: the number of the latest request's last event."""
    request_id = f"marker {uuid.uuid4()}"
    request = _plain(random.Random(1))
    request.request_id = request_id
    quire.generate(request)
    quire.settled_pool()
    return quire.kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id=request_id), timeout=10).events[-1].event


def check_that_nothing_is_left(quire: RunningQuire) -> None:
    """Check both tiers, the engine's requests and the audits."""
    pool = quire.settled_pool()
    assert (pool.sequences, pool.groups, pool.computed_tokens) == (0, 0, 0)
    assert (pool.device.held, pool.host.held) == (0, 0)
    assert (pool.device.free + pool.device.cached, pool.host.free + pool.host.cached) == (BLOCKS, BLOCKS)
    wait_until(lambda: _engine_requests(quire) == (0, 0), "the engine has no request")
    assert list(quire.kvmanager.Audit(kvmanager_pb2.AuditRequest(), timeout=10).violations) == []
    assert pool.totals.audit_violations == 0


def _engine_requests(quire: RunningQuire) -> tuple[float, float]:
    engine = Scrape.of(quire.metrics_urls["engine"])
    return engine.value("quire_num_requests_running"), engine.value("quire_num_requests_waiting")
