"""A client's request with its fields checked and its defaults filled in."""

import math
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.namespace import checked_salt
from services.gateway.text.stop_strings import StopRules
from services.gateway.text.tool_choice import check_arguments_schema
from services.runtime.errors import InvalidField
from services.runtime.http.json_body import parse_text
from services.wire.duration import checked_seconds_of, seconds_of

MAX_REQUEST_ID_BYTES = 128
_MAX_STOP_STRINGS = 64
_MAX_STOP_STRING_BYTES = 1024
_SEED_BITS = 63
_MAX_SAMPLES = 128
_MAX_LOGPROBS = 20
_MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_TOOL_CALLS = 16
_MAX_LENGTH_PENALTY = 10.0
_MAX_BAD_WORDS = 256
_MAX_BAD_WORD_BYTES = 256
MAX_TIMEOUT_SECONDS = 86_400
_NOT_EMPTY = "must not be empty"


@dataclass(frozen=True)
class Parameters:
    """A request without its prompt. `timeout` is in seconds. None: no limit, no log-probabilities, no constraint."""

    request_id: str
    sampling: decoding_pb2.Sampling
    beam_search: decoding_pb2.BeamSearch | None
    logit_rules: decoding_pb2.LogitRules
    stopping: StopRules
    logprobs: int | None
    prompt_logprobs: int | None
    constraint: decoding_pb2.OutputConstraint | None
    special_tokens: bool
    prompt_token_ids: bool
    salt: str
    priority: int
    timeout: float | None

    @classmethod
    def of(cls, request: gateway_pb2.GenerateRequest) -> "Parameters":
        """Check a request. Raises InvalidField for the first invalid field."""
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
            prompt_token_ids=request.output.prompt_token_ids,
            salt=checked_salt(request.cache.salt, "cache.salt"),
            priority=request.priority,
            timeout=_timeout(request),
        )

    def within(self, seconds_left: float | None) -> "Parameters":
        """Return a copy whose timeout is at most the call's remaining seconds."""
        if seconds_left is None:
            return self
        return replace(self, timeout=seconds_left if self.timeout is None else min(self.timeout, seconds_left))


def check_prompt(prompt: gateway_pb2.Prompt) -> None:
    """Raise InvalidField if the prompt is empty."""
    match prompt.WhichOneof("kind"):
        case "text":
            _require(prompt.text != "", "prompt.text", _NOT_EMPTY)
        case "token_ids":
            _require(len(prompt.token_ids.ids) > 0, "prompt.token_ids", _NOT_EMPTY)
        case "chat":
            _require(len(prompt.chat.messages) > 0, "prompt.chat.messages", _NOT_EMPTY)
        case _:
            raise InvalidField("prompt must be given: text, token_ids or chat", "prompt")


def check_truncation(request: gateway_pb2.GenerateRequest, context_tokens: int) -> None:
    """Raise InvalidField if a model of this context cannot truncate a prompt so."""
    if request.HasField("truncate_prompt_tokens"):
        most = request.truncate_prompt_tokens
        _require(
            most == -1 or 1 <= most <= context_tokens,
            "truncate_prompt_tokens",
            f"must be -1, or between 1 and {context_tokens}, the model's context, not {most}",
        )


def new_request_id() -> str:
    """Return a random request id."""
    return uuid.uuid4().hex


def _request_id(given: str) -> str:
    size = len(given.encode())
    _require(size <= MAX_REQUEST_ID_BYTES, "request_id", f"must have at most {MAX_REQUEST_ID_BYTES} bytes, not {size}")
    _require(given.isprintable() and given == given.strip(), "request_id", f"must be printable text, not {given!r}")
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
        f"must be a finite number of at least 0, not {temperature}",
    )
    _require(sampling.top_k >= 0, "sampling.top_k", f"must be at least 0, not {sampling.top_k}")
    _require(0 < top_p <= 1, "sampling.top_p", f"must be above 0 and at most 1, not {top_p}")
    _require(0 <= min_p <= 1, "sampling.min_p", f"must be between 0 and 1, not {min_p}")
    count = sampling.sample_count
    _require(1 <= count <= _MAX_SAMPLES, "sampling.sample_count", f"must be between 1 and {_MAX_SAMPLES}, not {count}")
    return sampling


def _beam_search(request: gateway_pb2.GenerateRequest) -> decoding_pb2.BeamSearch | None:
    """Check a beam search, and that no other field excludes it."""
    if not request.HasField("beam_search"):
        return None
    search = decoding_pb2.BeamSearch(width=1, length_penalty=1.0, early_stopping=False)
    search.MergeFrom(request.beam_search)
    width, penalty, sampling = search.width, search.length_penalty, request.sampling
    _require(1 <= width <= _MAX_SAMPLES, "beam_search.width", f"must be between 1 and {_MAX_SAMPLES}, not {width}")
    _require(
        abs(penalty) <= _MAX_LENGTH_PENALTY,
        "beam_search.length_penalty",
        f"must be between {-_MAX_LENGTH_PENALTY:g} and {_MAX_LENGTH_PENALTY:g}, not {penalty}",
    )
    _require(
        sampling.sample_count <= width,
        "sampling.sample_count",
        f"must be at most beam_search.width, which is {width}, not {sampling.sample_count}",
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
        _require(math.isfinite(value), f"logit_rules.{name}", f"must be a finite number, not {value}")
    repetition = given.repetition_penalty if given.HasField("repetition_penalty") else 1.0
    _require(repetition > 0, "logit_rules.repetition_penalty", f"must be above 0, not {repetition}")
    for token, bias in sorted(given.logit_bias.items()):
        _require(math.isfinite(bias), f"logit_rules.logit_bias[{token}]", f"must be a finite number, not {bias}")
    _check_texts("logit_rules.bad_words", given.bad_words, _MAX_BAD_WORDS, _MAX_BAD_WORD_BYTES)
    return given


def _check_texts(field: str, texts: Sequence[str], most: int, most_bytes: int) -> None:
    _require(len(texts) <= most, field, f"must have at most {most} entries, not {len(texts)}")
    for index, text in enumerate(texts):
        size = len(text.encode())
        _require(
            1 <= size <= most_bytes, f"{field}[{index}]", f"must have between 1 and {most_bytes} bytes, not {size}"
        )


def _logprobs(given: gateway_pb2.OutputOptions, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    if not given.HasField(name):
        return None
    count: int = getattr(given, name)
    _require(0 <= count <= _MAX_LOGPROBS, f"output.{name}", f"must be between 0 and {_MAX_LOGPROBS}, not {count}")
    return count


def _constraint(request: gateway_pb2.GenerateRequest) -> decoding_pb2.OutputConstraint | None:
    """Make the cheap checks; the engine compiles the constraint."""
    if not request.HasField("constraint"):
        return None
    given, kind = request.constraint, request.constraint.WhichOneof("kind")
    if kind is None:
        kinds = "json_schema, regex, json_object or tool_calls"
        raise InvalidField(f"constraint must have one of {kinds}", "constraint")
    if kind == "json_object":
        _require(given.json_object, "constraint.json_object", "must be true; for no constraint, leave constraint out")
    elif kind == "tool_calls":
        _check_tool_calls(given.tool_calls, "constraint.tool_calls")
    else:
        _check_language(f"constraint.{kind}", given.json_schema or given.regex)
    if given.HasField("json_schema"):
        parse_text(given.json_schema, "constraint.json_schema")
    check_alone(request, f"constraint.{kind}")
    return given


def check_alone(request: gateway_pb2.GenerateRequest, constraint: str) -> None:
    """Check that no other field excludes tokens beside a constraint, which errors call `constraint`.

    Raises InvalidField.
    """
    for field, present in (
        ("logit_rules.allowed_token_ids", len(request.logit_rules.allowed_token_ids) > 0),
        ("logit_rules.bad_words", len(request.logit_rules.bad_words) > 0),
        ("stopping.min_tokens", request.stopping.min_tokens > 0),
        ("stopping.ignore_eos", request.stopping.ignore_eos),
    ):
        _require(not present, field, f"cannot be combined with {constraint}")


def _check_language(field: str, text: str) -> None:
    size, limit = len(text.encode()), _MAX_CONSTRAINT_BYTES
    _require(1 <= size <= limit, field, f"must have between 1 and {limit} bytes, not {size}")


def _check_tool_calls(calls: decoding_pb2.ToolCallGrammar, field: str) -> None:
    most = calls.max_calls if calls.HasField("max_calls") else 1
    _require(1 <= most <= MAX_TOOL_CALLS, f"{field}.max_calls", f"must be between 1 and {MAX_TOOL_CALLS}, not {most}")
    _require(len(calls.tools) > 0, f"{field}.tools", _NOT_EMPTY)
    size, limit = calls.ByteSize(), _MAX_CONSTRAINT_BYTES
    _require(size <= limit, field, f"must have at most {limit} bytes, not {size}")
    for at, tool in enumerate(calls.tools):
        _require(tool.name != "", f"{field}.tools[{at}].name", _NOT_EMPTY)
        place = f"{field}.tools[{at}].parameters"
        check_arguments_schema(parse_text(tool.parameters, place), place)


def _stopping(given: decoding_pb2.Stopping) -> StopRules:
    limit = given.max_tokens if given.HasField("max_tokens") else None
    _require(limit is None or limit >= 1, "stopping.max_tokens", f"must be at least 1, not {limit}")
    min_tokens = given.min_tokens
    _require(min_tokens >= 0, "stopping.min_tokens", f"must be at least 0, not {min_tokens}")
    _require(
        limit is None or min_tokens <= limit,
        "stopping.min_tokens",
        f"must be at most stopping.max_tokens, which is {limit}, not {min_tokens}",
    )
    _check_texts("stopping.stop_strings", given.stop_strings, _MAX_STOP_STRINGS, _MAX_STOP_STRING_BYTES)
    return StopRules(
        max_tokens=limit,
        min_tokens=min_tokens,
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
        f"must be above 0 and at most {MAX_TIMEOUT_SECONDS} s, not {seconds:g} s",
    )
    return checked_seconds_of(request.timeout, "timeout")


def _require(holds: bool, field: str, rule: str) -> None:
    if not holds:
        raise InvalidField(f"{field} {rule}", field)
