"""Checks of a client's request: by the rules of its fields, then by its model."""

import secrets
import uuid
from collections.abc import Collection

from blocks import counted
from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.fleet.fleet import ServedModel
from services.gateway.text.tool_choice import check_arguments_schema, check_names
from services.runtime.errors import ContextExceeded, InvalidField
from services.runtime.http.json_body import parse_text
from services.wire.duration import checked_seconds_of
from services.wire.field_rules import check, check_message, declared_fields, fill

MAX_REQUEST_ID_BYTES = declared_fields(gateway_pb2.GenerateRequest.DESCRIPTOR)["request_id"].rules.max_bytes
_SEED_BITS = 63
# Parts of a request that have a field of GenerationDefaults, where it is not the sampling.
_PARTS = {"repetition_penalty": "logit_rules", "max_tokens": "stopping"}


def checked(request: gateway_pb2.GenerateRequest) -> gateway_pb2.GenerateRequest:
    """Return a request without its prompt, with an id and a seed; `fill_defaults` does the rest.

    A beam search is greedy by default. Raises InvalidField for the first invalid field.
    """
    check(request, InvalidField)
    _check_id(request.request_id)
    if request.HasField("beam_search") and request.stopping.HasField("max_tokens"):
        most = request.stopping.max_tokens
        _require(most > 0, "stopping.max_tokens", f"must be at least 1 with beam_search, not {most}")
    _check_constraint(request)
    made = gateway_pb2.GenerateRequest(
        request_id=request.request_id or new_request_id(),
        model=request.model,
        sampling={"seed": secrets.randbits(_SEED_BITS)},  # type: ignore[arg-type]
        logit_rules=request.logit_rules,
        beam_search=request.beam_search if request.HasField("beam_search") else None,
        constraint=request.constraint if request.HasField("constraint") else None,
        stopping=request.stopping,
        output=request.output,
        cache=request.cache,
        priority=request.priority,
        timeout=request.timeout if request.HasField("timeout") else None,
        thought=request.thought if request.HasField("thought") else None,
    )
    if request.HasField("beam_search"):
        made.sampling.temperature = 0.0
        fill(made.beam_search)
    made.sampling.MergeFrom(request.sampling)
    return made


def fill_defaults(
    request: gateway_pb2.GenerateRequest, of_model: decoding_pb2.GenerationDefaults
) -> decoding_pb2.GenerationDefaults:
    """Fill in what a checked request leaves out, and return what of it is the model's.

    A beam search has no use for the model's values of sampling. max_tokens is not filled in, because it depends on the
    prompt.
    """
    taken = decoding_pb2.GenerationDefaults()
    for field, value in of_model.ListFields():
        name = _PARTS.get(field.name, "sampling")
        part = getattr(request, name)
        if part.HasField(field.name) or (name == "sampling" and request.HasField("beam_search")):
            continue
        setattr(taken, field.name, value)
        if name != "stopping":
            setattr(part, field.name, value)
    fill(request.sampling)
    return taken


def timeout_of(request: gateway_pb2.GenerateRequest, seconds_left: float | None) -> float | None:
    """Return the seconds of a request's timeout, at most those of its call; None without a limit.

    Raises InvalidField.
    """
    given = checked_seconds_of(request.timeout, "timeout") if request.HasField("timeout") else None
    return min((one for one in (given, seconds_left) if one is not None), default=None)


def new_request_id() -> str:
    """Return a random request id."""
    return uuid.uuid4().hex


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


def check_vocabulary(request: gateway_pb2.GenerateRequest, vocabulary_size: int) -> None:
    """Raise InvalidField if a token id of another field than the prompt is outside the vocabulary."""
    rules = request.logit_rules
    check_ids(request.stopping.stop_token_ids, "stopping.stop_token_ids", vocabulary_size)
    check_ids(rules.allowed_token_ids, "logit_rules.allowed_token_ids", vocabulary_size)
    for token in sorted(rules.logit_bias):
        _check_token(token, f"logit_rules.logit_bias[{token}]", vocabulary_size)


def check_ids(token_ids: Collection[int], field: str, vocabulary_size: int) -> None:
    """Raise InvalidField for the first token id outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocabulary_size):
        return  # ten times faster than the loop
    for position, token in enumerate(token_ids):
        _check_token(token, f"{field}[{position}]", vocabulary_size)


def check_fits(count: int, field: str, model: ServedModel) -> None:
    """Raise ContextExceeded if there are more tokens than the model's context."""
    context = model.description().context_tokens
    if count > context:
        raise ContextExceeded(f"{field} must have at most {context} tokens, not {count}", field, count, context)


def check_room(prompt_tokens: int, max_tokens: int, context_tokens: int) -> None:
    """Raise ContextExceeded if a prompt leaves too little of the context for the output."""
    total = prompt_tokens + max_tokens
    if total > context_tokens:
        message = (
            f"prompt ({counted(prompt_tokens, 'token')}) and stopping.max_tokens ({max_tokens}) must be at most"
            f" {context_tokens} tokens, not {total}"
        )
        field = "stopping.max_tokens" if prompt_tokens < context_tokens else "prompt"
        raise ContextExceeded(message, field, prompt_tokens, context_tokens)


def _check_token(token: int, field: str, vocabulary_size: int) -> None:
    known = 0 <= token < vocabulary_size
    _require(known, field, f"must be a token id between 0 and {vocabulary_size - 1}, not {token}")


def _check_id(given: str) -> None:
    _require(given.isprintable() and given == given.strip(), "request_id", f"must be printable text, not {given!r}")


def _check_constraint(request: gateway_pb2.GenerateRequest) -> None:
    """Make the cheap checks; the engine compiles the constraint."""
    given, kind = request.constraint, request.constraint.WhichOneof("kind")
    if kind is None and request.HasField("constraint"):
        kinds = "json_schema, regex, json_object or tool_calls"
        raise InvalidField(f"constraint must have one of {kinds}", "constraint")
    if kind == "json_object":
        _require(given.json_object, "constraint.json_object", "must be true; for no constraint, leave constraint out")
    elif kind == "json_schema":
        parse_text(given.json_schema, "constraint.json_schema")
    check_names((tool.name for tool in given.tool_calls.tools), "constraint.tool_calls.tools")
    for at, tool in enumerate(given.tool_calls.tools):
        place = f"constraint.tool_calls.tools[{at}].parameters"
        check_arguments_schema(parse_text(tool.parameters, place), place)


def _require(holds: bool, field: str, rule: str) -> None:
    if not holds:
        raise InvalidField(f"{field} {rule}", field)
