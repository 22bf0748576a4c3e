"""A client's request with its fields checked and its defaults filled in."""

import secrets
import uuid
from dataclasses import dataclass, replace

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.text.stop_strings import StopRules
from services.gateway.text.tool_choice import check_arguments_schema
from services.runtime.errors import InvalidField
from services.runtime.http.json_body import parse_text
from services.wire.duration import checked_seconds_of
from services.wire.field_rules import check, check_message, declared_fields, fill

MAX_REQUEST_ID_BYTES = declared_fields(gateway_pb2.GenerateRequest.DESCRIPTOR)["request_id"].rules.max_bytes
_SEED_BITS = 63


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
        check(request, InvalidField)
        output = request.output
        return cls(
            request_id=_request_id(request.request_id),
            sampling=_sampling(request),
            beam_search=_beam_search(request),
            logit_rules=request.logit_rules,
            stopping=_stopping(request.stopping),
            logprobs=output.logprobs if output.HasField("logprobs") else None,
            prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
            constraint=_constraint(request),
            special_tokens=output.special_tokens,
            prompt_token_ids=output.prompt_token_ids,
            salt=request.cache.salt,
            priority=request.priority,
            timeout=checked_seconds_of(request.timeout, "timeout") if request.HasField("timeout") else None,
        )

    def within(self, seconds_left: float | None) -> "Parameters":
        """Return a copy whose timeout is at most the call's remaining seconds."""
        if seconds_left is None:
            return self
        return replace(self, timeout=seconds_left if self.timeout is None else min(self.timeout, seconds_left))


def check_prompt(prompt: gateway_pb2.Prompt) -> None:
    """Raise InvalidField if the prompt is empty."""
    if prompt.WhichOneof("kind") is None:
        raise InvalidField("prompt must be given: text, token_ids or chat", "prompt")
    check_message(prompt, InvalidField, "prompt.")


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
    _require(given.isprintable() and given == given.strip(), "request_id", f"must be printable text, not {given!r}")
    return given or new_request_id()


def _sampling(request: gateway_pb2.GenerateRequest) -> decoding_pb2.Sampling:
    """Return the parameters with their defaults: those of a search are greedy. The seed is drawn if none is given."""
    sampling = decoding_pb2.Sampling(seed=secrets.randbits(_SEED_BITS))
    if request.HasField("beam_search"):
        sampling.temperature = 0.0
    sampling.MergeFrom(request.sampling)
    fill(sampling)
    return sampling


def _beam_search(request: gateway_pb2.GenerateRequest) -> decoding_pb2.BeamSearch | None:
    if not request.HasField("beam_search"):
        return None
    search = decoding_pb2.BeamSearch()
    search.CopyFrom(request.beam_search)
    fill(search)
    return search


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
    elif kind == "json_schema":
        parse_text(given.json_schema, "constraint.json_schema")
    for at, tool in enumerate(given.tool_calls.tools):
        place = f"constraint.tool_calls.tools[{at}].parameters"
        check_arguments_schema(parse_text(tool.parameters, place), place)
    return given


def _stopping(given: decoding_pb2.Stopping) -> StopRules:
    return StopRules(
        max_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        min_tokens=given.min_tokens,
        strings=tuple(given.stop_strings),
        token_ids=tuple(given.stop_token_ids),
        include_stop=given.include_stop,
        ignore_eos=given.ignore_eos,
    )


def _require(holds: bool, field: str, rule: str) -> None:
    if not holds:
        raise InvalidField(f"{field} {rule}", field)
