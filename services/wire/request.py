"""Submissions of gateways, read as requests of the engine."""

from engine.bad_words import NO_BAD_WORDS, BadWords
from engine.constraint import Constraint
from engine.errors import InvalidRequest
from engine.schedule.request import NO_RULES, BeamSearch, LogitRules, Request, Sampling, Stopping
from quire.v1 import decoding_pb2, engine_pb2
from services.wire.duration import MAX_SECONDS, seconds_of

# Gateways admit no more samples of one prompt.
_MAX_SAMPLES = 128


def check(submission: engine_pb2.Submission) -> None:
    """Check the fields that are used before the request is read. Raises InvalidRequest."""
    count = max(submission.sampling.sample_count, len(submission.samples))
    if submission.sampling.sample_count < 0 or count > _MAX_SAMPLES:
        given = submission.sampling.sample_count if submission.sampling.sample_count < 0 else count
        raise InvalidRequest(
            f"sampling.sample_count must be between 1 and {_MAX_SAMPLES}, not {given}", "sampling.sample_count"
        )
    for name in ("age", "timeout"):
        seconds, least = seconds_of(getattr(submission, name)), 0 if name == "age" else -MAX_SECONDS
        if not least <= seconds <= MAX_SECONDS:
            raise InvalidRequest(f"{name} must be between {least} and {MAX_SECONDS} s, not {seconds:g} s", name)


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


def _logit_rules(submission: engine_pb2.Submission) -> LogitRules:
    given, words = submission.logit_rules, tuple(tuple(one.token_ids) for one in submission.bad_words)
    rules = LogitRules(
        repetition_penalty=given.repetition_penalty if given.HasField("repetition_penalty") else 1.0,
        frequency_penalty=given.frequency_penalty,
        presence_penalty=given.presence_penalty,
        logit_bias=tuple(given.logit_bias.items()),
        allowed_token_ids=tuple(dict.fromkeys(given.allowed_token_ids)),
        bad_words=BadWords(words) if words else NO_BAD_WORDS,
    )
    return NO_RULES if rules == NO_RULES else rules  # one object, because every token compares them
