"""Requests with numbers at their extremes, two of them at a time, in requests of every kind.

The number of a case says all about it: the same number is the same case in every run. It goes to the gateway, or, so
that its checks are not all there is, to the engine itself. Numbers with rules in the protos are found there.
"""

import itertools
import math
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.runtime.errors import FIELD_METADATA
from services.wire.field_rules import FieldPath, field_paths
from tests.running.neighbour import Neighbour, tokens_over_grpc
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire
from tests.tiny_models import VOCABULARY

CLIENTS = 16
WINDOW = 48  # submissions in flight on one stream to the engine

Message = gateway_pb2.GenerateRequest | engine_pb2.Submission
Set = Callable[[Any, Any], None]
Admits = Callable[[Any], bool]

_MAX_TOKENS = 4
_REFUSED = 0.35  # the share of cases whose extremes need not be in range
_INT32, _INT64 = 2**31, 2**63
_TINY = (0.0, -0.0, 5e-324, -5e-324, 2.3e-308, 1e-300, 1e-45, 1.2e-38, -1e-38, 1e-30, 1e-9, -1e-9)
_PLAIN = (0.3, 1 - 2**-53, 1.0, 1 + 2**-52, -1.0, 2.0, -2.0, 10.0, -10.0, 10.000001, 100.0, 500.0, -500.0)
_HUGE = (1e9, -1e9, 1e10, 3.4e38, 3.5e38, -3.5e38, 1e39, 1e300, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan)
_DOUBLES = (*_TINY, *_PLAIN, *_HUGE)
_COUNTS = (-_INT32, 1 - _INT32, -1000, -2, -1, 0, 1, 2, 3, 19, 20, 21, 2047, 2048, 65536, _INT32 - 2, _INT32 - 1)
_SEVERAL = (*_COUNTS, 16, 17, 64, 65, 127, 128, 129)
_TOKENS = (*_COUNTS, VOCABULARY - 1, VOCABULARY, VOCABULARY + 1, 8 * 64, 1 << 24)
_SEEDS = (-_INT64, 1 - _INT64, -1, 0, 1, _INT32, 1 << 53, _INT64 - 1)
_TIMES = (
    *((seconds, 0) for seconds in (-_INT64, -(10**12), -1, 0, 1, 60, 86_400, 86_401, 315_576_000_000)),
    *((seconds, 0) for seconds in (315_576_000_001, 10**14, _INT64 - 1)),
    *((0, nanos) for nanos in (-_INT32, -1, 1, 999, 10**6, 10**9, _INT32 - 1)),
    (60, -1),
)


def _appended(part: str, name: str) -> Set:
    return lambda request, value: getattr(getattr(request, part), name).append(value)


def _bias_of(request: Message, token: int) -> None:
    request.logit_rules.logit_bias[token] = 1.5


def _duration(path: FieldPath) -> Set:
    def apply(request: Any, value: tuple[int, int]) -> None:
        time = getattr(request, path.field.name)
        time.seconds, time.nanos = value

    return apply


def _prompt(request: Message, token: int) -> None:
    ids = request.prompt_token_ids if isinstance(request, engine_pb2.Submission) else request.prompt.token_ids.ids
    ids.append(token)


def _of_output(request: Message) -> Any:
    return request if isinstance(request, engine_pb2.Submission) else request.output


def _generated(request: engine_pb2.Submission, token: int) -> None:
    samples = request.samples or [request.samples.add()]
    samples[0].generated_token_ids.append(token)


def _calls(request: Message, value: int) -> None:
    calls = request.constraint.tool_calls
    calls.max_calls = value
    if not calls.tools:
        calls.tools.add(name="f", parameters='{"type": "object"}')


def _bad_word(request: engine_pb2.Submission, token: int) -> None:
    request.bad_words.add(token_ids=[token])


def _from(least: float, most: float) -> Admits:
    return lambda value: least <= value <= most


_IS_TOKEN = _from(0, VOCABULARY - 1)
# Larger numbers are in range, but take long.
_FAST = {"sampling.sample_count": 16, "beam_search.width": 17, "stopping.max_tokens": 21, "stopping.min_tokens": 4}

Extreme = tuple[Set, Sequence[Any], Admits]

# Setter, extremes and valid range of token ids, which depend on the vocabulary.
_TOKEN_FIELDS: dict[str, Extreme] = {
    "logit_rules.logit_bias's token": (_bias_of, _TOKENS, _IS_TOKEN),
    "logit_rules.allowed_token_ids": (_appended("logit_rules", "allowed_token_ids"), _TOKENS, _IS_TOKEN),
    "stopping.stop_token_ids": (_appended("stopping", "stop_token_ids"), _TOKENS, _IS_TOKEN),
    "prompt": (_prompt, _TOKENS, _IS_TOKEN),
}
_TOKEN_FIELDS_OF_THE_ENGINE: dict[str, Extreme] = {
    "bad_words.token_ids": (_bad_word, _TOKENS, _IS_TOKEN),
    "samples.generated_token_ids": (_generated, _TOKENS, _IS_TOKEN),
}
_NUMBERS = {
    FieldDescriptor.TYPE_DOUBLE: _DOUBLES,
    FieldDescriptor.TYPE_INT32: (*_SEVERAL, VOCABULARY - 1, VOCABULARY, 1 << 24),
    FieldDescriptor.TYPE_INT64: _SEEDS,
}


def _extreme(path: FieldPath) -> Extreme | None:
    """The extremes of a number, None for other fields."""
    field, most = path.field, _FAST.get(path.text, math.inf)
    if field.is_duration:
        return _duration(path), _TIMES, lambda value: field.holds(value[0] + value[1] / 1e9)
    if field.is_map:
        return (lambda request, value: path.set(request, {7: value})), _NUMBERS[field.value_type], field.holds
    if field.descriptor.is_repeated or field.value_type not in _NUMBERS:
        return None
    return path.set, _NUMBERS[field.value_type], lambda value: field.holds(value) and value <= most


def _extremes(request: Message) -> dict[str, Extreme]:
    found = {path.text: _extreme(path) for path in field_paths(request.DESCRIPTOR)}
    own = _TOKEN_FIELDS | {"constraint.tool_calls.max_calls": (_calls, _COUNTS, _from(1, 16))}
    return {name: extreme for name, extreme in found.items() if extreme} | own


def _priority(request: engine_pb2.Submission, value: int) -> None:
    request.priority = value


def _attempt(request: engine_pb2.Submission, value: int) -> None:
    request.attempt = value


_OF_THE_GATEWAY = _extremes(gateway_pb2.GenerateRequest())
_OF_THE_ENGINE = (
    _extremes(engine_pb2.Submission())
    | _TOKEN_FIELDS_OF_THE_ENGINE
    | {"attempt": (_attempt, _COUNTS, lambda _: True), "priority": (_priority, _COUNTS, lambda _: True)}
)
FIELDS = _OF_THE_GATEWAY | _OF_THE_ENGINE


@dataclass(frozen=True)
class Case:
    """A request, for the engine or for the gateway, and the fields of it that are extreme."""

    number: int
    kind: str
    request: Message
    extremes: dict[str, Any]

    @property
    def is_submission(self) -> bool:
        return isinstance(self.request, engine_pb2.Submission)


def case(number: int) -> Case:
    draw = random.Random(number)
    of_the_engine = draw.random() < 0.5
    fields = _OF_THE_ENGINE if of_the_engine else _OF_THE_GATEWAY
    kind = draw.choice([*_KINDS])
    request = _submission(number) if of_the_engine else gateway_pb2.GenerateRequest()
    _prompt(request, 20)
    _prompt(request, 30 + number % 50)
    request.sampling.temperature, request.sampling.top_p, request.sampling.seed = 0, 1, number
    request.stopping.max_tokens = _MAX_TOKENS
    _KINDS[kind](request)
    names, refusable = draw.sample([*fields], 2), draw.random() < _REFUSED
    extremes = {
        name: draw.choice([value for value in fields[name][1] if refusable or fields[name][2](value)]) for name in names
    }
    for name, value in extremes.items():
        fields[name][0](request, value)
    return Case(number, kind, request, extremes)


def _submission(number: int) -> engine_pb2.Submission:
    return engine_pb2.Submission(request_id=f"extreme-{number}", attempt=1)


def _sampled(request: Any) -> None:
    request.sampling.temperature, request.sampling.top_p, request.sampling.min_p = 0.9, 0.95, 0.01


def _samples(request: Any) -> None:
    _sampled(request)
    request.sampling.sample_count = 3


def _beams(request: Any) -> None:
    request.beam_search.width, request.sampling.sample_count = 3, 2


def _ruled(request: Any) -> None:
    request.logit_rules.repetition_penalty, request.logit_rules.presence_penalty = 1.3, 0.4
    request.logit_rules.frequency_penalty, request.stopping.min_tokens = 0.3, 1


def _constrained(request: Any) -> None:
    request.constraint.regex = "[a-z]{2,}"


def _constrained_samples(request: Any) -> None:
    _samples(request)
    _constrained(request)


def _constrained_beams(request: Any) -> None:
    _beams(request)
    _constrained(request)


def _scored(request: Any) -> None:
    _sampled(request)
    _of_output(request).logprobs = 3


def _scored_prompt(request: Any) -> None:
    _of_output(request).prompt_logprobs = 2


_KINDS: dict[str, Callable[[Any], None]] = {
    "greedy": lambda _: None,
    "sampled": _sampled,
    "samples": _samples,
    "beams": _beams,
    "ruled": _ruled,
    "constrained": _constrained,
    "constrained samples": _constrained_samples,
    "constrained beams": _constrained_beams,
    "log-probabilities": _scored,
    "log-probabilities of the prompt": _scored_prompt,
}


@dataclass
class Outcomes:
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    _adding: threading.Lock = field(default_factory=threading.Lock)

    def add(self, one: Case, end: str, faults: Iterable[str]) -> None:
        """Called by many threads: without the lock, counts were lost."""
        found = list(faults)
        with self._adding:
            self._add(one, end, found)

    def _add(self, one: Case, end: str, faults: Iterable[str]) -> None:
        self.ends[f"{'engine' if one.is_submission else 'gateway'}: {end}"] += 1
        self.faults += (f"case {one.number}, {one.kind}, {one.extremes}: {fault}" for fault in faults)


def run_cases(quire: RunningQuire, numbers: Sequence[int], outcomes: Outcomes) -> None:
    """Run the cases of these numbers while another stream continues unchanged."""
    cases = [case(number) for number in numbers]
    pool, processes = quire.pool(), quire.children()
    neighbour = Neighbour(lambda: tokens_over_grpc(quire.gateway))
    try:
        with ThreadPoolExecutor(CLIENTS + 1) as clients:
            submitted = clients.submit(_submit, quire, [one for one in cases if one.is_submission], outcomes)
            calls = [one for one in cases if not one.is_submission]
            for _ in clients.map(lambda one: _call(quire, one, outcomes), calls):
                pass
            submitted.result()
        neighbour.wait_for_tokens()
    finally:
        neighbour.close()
    outcomes.faults += neighbour.faults
    assert neighbour.streams > 0
    settled = quire.settled_pool()
    assert (settled.incarnation, quire.children()) == (pool.incarnation, processes), "a service was restarted"
    assert settled.device.held == 0, "no prefix is pinned"


# To the gateway


def _call(quire: RunningQuire, one: Case, outcomes: Outcomes) -> None:
    answer = Answer()
    try:
        for response in quire.gateway.Generate(one.request, timeout=CALL_SECONDS):
            answer.add(response)
    except grpc.RpcError as error:
        metadata = {str(entry.key): str(entry.value) for entry in error.trailing_metadata() or ()}
        blamed, code = metadata.get(FIELD_METADATA, ""), error.code()
        late = code is grpc.StatusCode.DEADLINE_EXCEEDED and "timeout" in one.extremes
        refused = code is grpc.StatusCode.INVALID_ARGUMENT and blamed and blamed.split("[")[0] in error.details()
        outcomes.add(one, code.name, [] if late or refused else [f"{code}, blaming {blamed!r}: {error.details()}"])
        return
    tokens: list[list[int]] = [[] for _ in answer.finished.samples]
    for delta in answer.deltas:
        tokens[delta.sample] += delta.token_ids
    ends = [(end.reason, end.score) for end in answer.finished.samples]
    outcomes.add(one, "OK", _wrong(one, tokens, ends, [*answer.logprobs, *answer.prompt_logprobs]))


def _wrong(
    one: Case,
    tokens: list[list[int]],
    ends: list[tuple[int, float]],
    logprobs: Iterable[decoding_pb2.TokenLogprobs],
) -> Iterator[str]:
    request = one.request
    allowed = set(request.logit_rules.allowed_token_ids) or set(range(VOCABULARY))
    stops = {0, *request.stopping.stop_token_ids}
    numbers = [number for entry in logprobs for number in (entry.logprob, *entry.top_logprobs)]
    if not all(0 <= token < VOCABULARY for text in tokens for token in text):
        yield f"tokens {tokens}"
    if not all(allowed.issuperset(text) for text in tokens):
        yield f"tokens {tokens} that are not allowed"
    if any(len(text) > request.stopping.max_tokens for text in tokens):
        yield f"too many tokens {tokens}"
    before = [len(sample.generated_token_ids) for sample in getattr(request, "samples", ())]
    barred = [max(0, request.stopping.min_tokens - count) for count in (*before, *[0] * len(tokens))]
    if any(stops.intersection(text[:count]) for text, count in zip(tokens, barred, strict=False)):
        yield f"an end before min_tokens: {tokens}"
    if not all(reason in (decoding_pb2.FINISH_REASON_STOP, decoding_pb2.FINISH_REASON_LENGTH) for reason, _ in ends):
        yield f"ends {ends}"
    if not all(math.isfinite(number) and number <= 0 for number in numbers):
        yield f"log-probabilities {numbers}"
    if not all(math.isfinite(score) for _, score in ends):
        yield f"scores {ends}"


# To the engine


def _submit(quire: RunningQuire, cases: list[Case], outcomes: Outcomes) -> None:
    """Submit cases on one stream, at most WINDOW at a time."""
    if not cases:
        return
    outgoing: queue.SimpleQueue[engine_pb2.ServeRequest | None] = queue.SimpleQueue()
    pending, in_flight = iter(cases), dict[str, Case]()
    tokens: dict[str, list[list[int]]] = {}
    logprobs: dict[str, list[decoding_pb2.TokenLogprobs]] = {}

    def send(most: int) -> None:
        for one in itertools.islice(pending, most):
            assert isinstance(one.request, engine_pb2.Submission)
            in_flight[one.request.request_id] = one
            outgoing.put(engine_pb2.ServeRequest(submission=one.request))

    send(WINDOW)
    call = quire.engine.Serve(iter(outgoing.get, None), timeout=3600)
    for response in call:
        step = response.step
        for new in step.tokens:
            texts = tokens.setdefault(new.request_id, [])
            texts += ([] for _ in range(new.sample + 1 - len(texts)))
            texts[new.sample] += new.token_ids
            logprobs.setdefault(new.request_id, []).extend(new.logprobs)
        for scores in step.prompts:
            logprobs.setdefault(scores.request_id, []).extend(scores.logprobs)
        for refused in step.refused:
            named = refused.reason == engine_pb2.REFUSAL_REASON_INVALID and refused.field and refused.detail
            outcomes.add(in_flight.pop(refused.request_id), "REFUSED", [] if named else [str(refused)])
        for finished in step.finished:
            one = in_flight.pop(finished.request_id)
            texts = tokens.pop(finished.request_id, [])
            outcomes.add(one, *_end(one, finished, texts, logprobs.pop(finished.request_id, [])))
        send(WINDOW - len(in_flight))
        if not in_flight:
            break
    outgoing.put(None)
    call.cancel()


def _end(
    one: Case,
    finished: engine_pb2.RequestFinished,
    tokens: list[list[int]],
    logprobs: list[decoding_pb2.TokenLogprobs],
) -> tuple[str, list[str]]:
    if finished.failure == engine_pb2.FAILURE_REASON_UNSPECIFIED:
        ends = [(end.reason, end.score) for end in finished.samples]
        return "OK", [*_wrong(one, tokens, ends, logprobs)]
    late = finished.failure in (engine_pb2.FAILURE_REASON_DEADLINE, engine_pb2.FAILURE_REASON_DEADLINE_QUEUED)
    return "FAILED", [] if late and "timeout" in one.extremes else [str(finished)]
