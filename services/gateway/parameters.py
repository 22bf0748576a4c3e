"""A client's request, checked field by field and with defaults filled in."""

import json
import math
import secrets
import uuid
from dataclasses import dataclass, replace
from typing import Literal

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.namespace import checked_salt
from services.gateway.text.stop_strings import StopRules
from services.runtime.errors import InvalidField
from services.wire.duration import seconds_of

MAX_REQUEST_ID_BYTES = 128
_MOST_STOP_STRINGS = 64
_LONGEST_STOP_STRING_BYTES = 1024
_SEED_BITS = 63
_MOST_SAMPLES = 128
_MOST_LOGPROBS = 20
_LONGEST_CONSTRAINT_BYTES = 64 * 1024
_MOST_LENGTH_PENALTY = 10.0
MAX_TIMEOUT_SECONDS = 86_400


@dataclass(frozen=True)
class Parameters:
    """Everything of a request but its prompt.

    `timeout` is in seconds; None: no limit, no log-probabilities, no constraint.
    """

    request_id: str
    sampling: decoding_pb2.Sampling
    beam_search: decoding_pb2.BeamSearch | None
    logit_rules: decoding_pb2.LogitRules
    stopping: StopRules
    logprobs: int | None
    prompt_logprobs: int | None
    constraint: decoding_pb2.OutputConstraint | None
    special_tokens: bool
    salt: str
    priority: int
    timeout: float | None

    @classmethod
    def of(cls, request: gateway_pb2.GenerateRequest) -> "Parameters":
        """Check a request. Raises InvalidField for the first field that is wrong."""
        return cls(
            request_id=_request_id(request.request_id),
            sampling=_sampling(request.sampling, searches=request.HasField("beam_search")),
            beam_search=_beam_search(request),
            logit_rules=_logit_rules(request.logit_rules),
            stopping=_stopping(request.stopping),
            logprobs=_logprobs(request.output, "logprobs"),
            prompt_logprobs=_logprobs(request.output, "prompt_logprobs"),
            constraint=_constraint(request),
            special_tokens=request.output.special_tokens,
            salt=checked_salt(request.cache.salt, "cache.salt"),
            priority=request.priority,
            timeout=_timeout(request),
        )

    def within(self, seconds_left: float | None) -> "Parameters":
        """Return the same with no more time than the call has."""
        if seconds_left is None:
            return self
        return replace(self, timeout=seconds_left if self.timeout is None else min(self.timeout, seconds_left))


def check_prompt(prompt: gateway_pb2.Prompt) -> None:
    """Raise InvalidField when there is nothing to continue."""
    match prompt.WhichOneof("kind"):
        case "text":
            _require(prompt.text != "", "prompt.text", "is empty")
        case "token_ids":
            _require(len(prompt.token_ids.ids) > 0, "prompt.token_ids", "is empty")
        case "chat":
            _require(len(prompt.chat.messages) > 0, "prompt.chat.messages", "is empty")
        case _:
            raise InvalidField("prompt is missing: give text, token_ids or chat", "prompt")


def new_request_id() -> str:
    """Return an id that no other request has."""
    return uuid.uuid4().hex


def _request_id(given: str) -> str:
    size = len(given.encode())
    _require(size <= MAX_REQUEST_ID_BYTES, "request_id", f"has {size} bytes, the most is {MAX_REQUEST_ID_BYTES}")
    return given or new_request_id()


def _sampling(given: decoding_pb2.Sampling, *, searches: bool) -> decoding_pb2.Sampling:
    temperature = 0.0 if searches else 1.0
    sampling = decoding_pb2.Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, sample_count=1)
    sampling.seed = secrets.randbits(_SEED_BITS)
    sampling.MergeFrom(given)
    temperature, top_p, min_p = sampling.temperature, sampling.top_p, sampling.min_p
    _require(
        math.isfinite(temperature) and temperature >= 0,
        "sampling.temperature",
        f"is {temperature}, it must be a finite number that is not negative",
    )
    _require(sampling.top_k >= 0, "sampling.top_k", f"is {sampling.top_k}, it must not be negative")
    _require(0 < top_p <= 1, "sampling.top_p", f"is {top_p}, it must be above 0 and at most 1")
    _require(0 <= min_p <= 1, "sampling.min_p", f"is {min_p}, it must be from 0 to 1")
    count = sampling.sample_count
    _require(1 <= count <= _MOST_SAMPLES, "sampling.sample_count", f"is {count}, it must be from 1 to {_MOST_SAMPLES}")
    return sampling


def _beam_search(request: gateway_pb2.GenerateRequest) -> decoding_pb2.BeamSearch | None:
    """Check a beam search, and that nothing is asked for that it cannot give."""
    if not request.HasField("beam_search"):
        return None
    search = decoding_pb2.BeamSearch(width=1, length_penalty=1.0, early_stopping=False)
    search.MergeFrom(request.beam_search)
    width, penalty, sampling = search.width, search.length_penalty, request.sampling
    _require(1 <= width <= _MOST_SAMPLES, "beam_search.width", f"is {width}, it must be from 1 to {_MOST_SAMPLES}")
    _require(
        abs(penalty) <= _MOST_LENGTH_PENALTY,
        "beam_search.length_penalty",
        f"is {penalty}, it must be from {-_MOST_LENGTH_PENALTY:g} to {_MOST_LENGTH_PENALTY:g}",
    )
    _require(
        sampling.sample_count <= width,
        "sampling.sample_count",
        f"is {sampling.sample_count}, a search of {width} beams has at most as many answers",
    )
    excluded = {
        "sampling.temperature": sampling.temperature != 0,
        "sampling.top_k": sampling.top_k != 0,
        "sampling.top_p": sampling.HasField("top_p") and sampling.top_p != 1,
        "sampling.min_p": sampling.min_p != 0,
        "output.logprobs": request.output.HasField("logprobs"),
        "stopping.stop_strings": len(request.stopping.stop_strings) > 0,
    }
    for field, given in excluded.items():
        _require(not given, field, "cannot be combined with beam_search")
    return search


def _logit_rules(given: decoding_pb2.LogitRules) -> decoding_pb2.LogitRules:
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        value = getattr(given, name)
        _require(math.isfinite(value), f"logit_rules.{name}", f"is {value}, it must be a finite number")
    repetition = given.repetition_penalty if given.HasField("repetition_penalty") else 1.0
    _require(repetition > 0, "logit_rules.repetition_penalty", f"is {repetition}, it must be above 0")
    for token, bias in sorted(given.logit_bias.items()):
        _require(math.isfinite(bias), f"logit_rules.logit_bias[{token}]", f"is {bias}, it must be a finite number")
    return given


def _logprobs(given: gateway_pb2.OutputOptions, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    if not given.HasField(name):
        return None
    count: int = getattr(given, name)
    _require(0 <= count <= _MOST_LOGPROBS, f"output.{name}", f"is {count}, it must be from 0 to {_MOST_LOGPROBS}")
    return count


def _constraint(request: gateway_pb2.GenerateRequest) -> decoding_pb2.OutputConstraint | None:
    """Check what is cheap to check; the engine compiles it."""
    if not request.HasField("constraint"):
        return None
    given, kind = request.constraint, request.constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidField("constraint must have one of json_schema, regex or json_object", "constraint")
    if kind == "json_object":
        _require(given.json_object, "constraint.json_object", "is false: leave the constraint out instead")
    else:
        _check_language(f"constraint.{kind}", given.json_schema or given.regex)
    if given.HasField("json_schema"):
        _check_json(given.json_schema)
    for field, present in (
        ("logit_rules.allowed_token_ids", len(request.logit_rules.allowed_token_ids) > 0),
        ("stopping.ignore_eos", request.stopping.ignore_eos),
    ):
        _require(not present, field, "cannot be given together with constraint")
    return given


def _check_language(field: str, text: str) -> None:
    size, most = len(text.encode()), _LONGEST_CONSTRAINT_BYTES
    _require(1 <= size <= most, field, f"has {size} bytes, it must have 1 to {most}")


def _check_json(text: str) -> None:
    try:
        json.loads(text)
    except RecursionError as error:
        raise InvalidField("constraint.json_schema is nested too deeply", "constraint.json_schema") from error
    except ValueError as error:
        raise InvalidField(f"constraint.json_schema is no JSON: {error}", "constraint.json_schema") from error


def _stopping(given: decoding_pb2.Stopping) -> StopRules:
    limit = given.max_tokens if given.HasField("max_tokens") else None
    _require(limit is None or limit >= 1, "stopping.max_tokens", f"is {limit}, it must be at least 1")
    least = given.min_tokens
    _require(least >= 0, "stopping.min_tokens", f"is {least}, it must not be negative")
    _require(limit is None or least <= limit, "stopping.min_tokens", f"is {least}, but stopping.max_tokens is {limit}")
    count = len(given.stop_strings)
    _require(
        count <= _MOST_STOP_STRINGS, "stopping.stop_strings", f"has {count} entries, the most is {_MOST_STOP_STRINGS}"
    )
    for index, text in enumerate(given.stop_strings):
        size = len(text.encode())
        _require(
            1 <= size <= _LONGEST_STOP_STRING_BYTES,
            f"stopping.stop_strings[{index}]",
            f"has {size} bytes, it must have 1 to {_LONGEST_STOP_STRING_BYTES}",
        )
    return StopRules(
        max_tokens=limit,
        min_tokens=least,
        strings=tuple(given.stop_strings),
        token_ids=tuple(given.stop_token_ids),
        include_stop=given.include_stop,
        ignore_eos=given.ignore_eos,
    )


def _timeout(request: gateway_pb2.GenerateRequest) -> float | None:
    if not request.HasField("timeout"):
        return None
    seconds = seconds_of(request.timeout)
    _require(
        0 < seconds <= MAX_TIMEOUT_SECONDS,
        "timeout",
        f"is {seconds:g} s, it must be above 0 and at most {MAX_TIMEOUT_SECONDS}",
    )
    return seconds


def _require(holds: bool, field: str, fault: str) -> None:
    if not holds:
        raise InvalidField(f"{field} {fault}", field)
