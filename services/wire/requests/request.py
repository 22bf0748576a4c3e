"""Submissions of gateways, read as requests of the engine."""

from dataclasses import fields

from engine.bad_words import NO_BAD_WORDS, BadWords
from engine.constraint import Constraint
from engine.errors import InvalidRequest
from engine.schedule.request import NO_RULES, BeamSearch, LogitRules, Request, Sampling, Stopping
from quire.v1 import decoding_pb2, engine_pb2
from services.wire.duration import seconds_of
from services.wire.field_rules import check as check_rules
from services.wire.field_rules import effective

_SAMPLING = tuple(field.name for field in fields(Sampling))
_BEAM_SEARCH = tuple(field.name for field in fields(BeamSearch))
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def check(submission: engine_pb2.Submission) -> None:
    """Check a submission by the rules of its fields. Raises InvalidRequest."""
    check_rules(submission, InvalidRequest)
    if not submission.stopping.HasField("max_tokens"):  # else it would count as 0, which generates nothing
        raise InvalidRequest("stopping.max_tokens must be given", "stopping.max_tokens")


def request_of(
    submission: engine_pb2.Submission, eos_token_ids: frozenset[int], now: float, constraint: Constraint | None = None
) -> Request:
    """Read a checked submission, with its compiled constraint. `now` is the engine's clock, in seconds."""
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
        logit_rules=_logit_rules(submission),
        logprobs=submission.logprobs if submission.HasField("logprobs") else None,
        prompt_logprobs=submission.prompt_logprobs if submission.HasField("prompt_logprobs") else None,
        beam_search=_beam_search(submission.beam_search) if submission.HasField("beam_search") else None,
        constraint=constraint,
        ended=frozenset(index for index, sample in enumerate(submission.samples) if sample.ended),
        isolated=submission.isolated,
    )


def _sampling(given: decoding_pb2.Sampling) -> Sampling:
    return Sampling(**{name: effective(given, name) for name in _SAMPLING})


def _beam_search(given: decoding_pb2.BeamSearch) -> BeamSearch:
    return BeamSearch(**{name: effective(given, name) for name in _BEAM_SEARCH})


def _stopping(given: decoding_pb2.Stopping, eos_token_ids: frozenset[int]) -> Stopping:
    stops, none = frozenset(given.stop_token_ids), frozenset[int]()
    ends, ignored = (none, eos_token_ids) if given.ignore_eos else (eos_token_ids, none)
    return Stopping(given.max_tokens, stops | ends, given.min_tokens, ignored)


def _logit_rules(submission: engine_pb2.Submission) -> LogitRules:
    given, words = submission.logit_rules, tuple(tuple(one.token_ids) for one in submission.bad_words)
    rules = LogitRules(
        **{name: effective(given, name) for name in _PENALTIES},
        logit_bias=tuple(given.logit_bias.items()),
        allowed_token_ids=tuple(dict.fromkeys(given.allowed_token_ids)),
        bad_words=BadWords(words) if words else NO_BAD_WORDS,
    )
    return NO_RULES if rules == NO_RULES else rules  # one object, because every token compares them
