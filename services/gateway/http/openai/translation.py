"""Translates OpenAI's request bodies to the gateway's GenerateRequest."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.duration_pb2 import Duration

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.http.openai import requests
from services.gateway.http.openai.constraints import check_tool_choice, constraint_of
from services.gateway.http.openai.declared_fields import DECLARED, set_declared
from services.gateway.http.openai.field_names import FieldNames
from services.gateway.http.openai.messages import chat
from services.gateway.request_checks import new_request_id
from services.runtime.errors import InvalidField, UnsupportedField
from services.runtime.http.validation import shown
from services.wire.duration import duration
from services.wire.field_rules import declared_fields

CHAT_ID_PREFIX = "chatcmpl-"
_DEFAULT_COMPLETION_TOKENS = 16
# With log-probabilities of the prompt, a chat is generated from token ids.
_PROMPT = dict.fromkeys(("prompt", "prompt.token_ids", "prompt.token_ids.ids"), "messages")
_ALL = -1  # vLLM's value of top_k for all tokens
_LAST_ID = 2**31 - 1
_TIMEOUT = declared_fields(gateway_pb2.GenerateRequest.DESCRIPTOR)["timeout"]
# Without leading zeros: "5" and "05" would be two biases of one token.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")
_REQUEST_ID = re.compile(r"[!-~]{1,100}")


@dataclass(frozen=True)
class TranslatedCall:
    """A translated request: its id, one generation for each prompt, and the HTTP names of its fields."""

    request_id: str
    generations: list[gateway_pb2.GenerateRequest]
    field_names: FieldNames


def completion_call(body: requests.CompletionRequest) -> TranslatedCall:
    """Translate the body of /v1/completions. Raises InvalidField or UnsupportedField."""
    common, names = _common(body)
    common.stopping.max_tokens = _DEFAULT_COMPLETION_TOKENS
    _limit(common, body, names)
    if body.logprobs is not None:
        common.output.logprobs = body.logprobs
    prompts, full_id = _prompts(body.prompt), f"cmpl-{_request_id(body.request_id)}"
    generations = [gateway_pb2.GenerateRequest(prompt=prompt) for prompt in prompts]
    for at, generation in enumerate(generations):
        generation.MergeFrom(common)
        generation.request_id = full_id if len(prompts) == 1 else f"{full_id}-{at}"
    return TranslatedCall(full_id, generations, FieldNames(names))


def chat_call(body: requests.ChatCompletionRequest, id_prefix: str = CHAT_ID_PREFIX) -> TranslatedCall:
    """Translate the body of /v1/chat/completions; see `completion_call`."""
    common, names = _common(body)
    common.request_id = f"{id_prefix}{_request_id(body.request_id)}"
    tools = [] if body.tool_choice == "none" else body.tools or []
    common.prompt.chat.CopyFrom(chat(body.messages, tools, body))
    _limit(common, body, names)
    _check_generates(common, body, names)
    if body.thinking and body.thinking_token_budget is None:
        set_declared(common, {"thinking_token_budget": body.thinking.budget_tokens})
    if body.top_logprobs and not body.logprobs:
        raise InvalidField("top_logprobs requires logprobs to be true", "top_logprobs")
    if body.logprobs:
        names["output.logprobs"] = "logprobs" if body.top_logprobs is None else "top_logprobs"
        common.output.logprobs = body.top_logprobs or 0
    constraint_tools = check_tool_choice(common, body, names)
    return TranslatedCall(common.request_id, [common], FieldNames(names | _PROMPT, constraint_tools))


def _common(body: requests.GenerationRequest) -> tuple[gateway_pb2.GenerateRequest, dict[str, str]]:
    """Translate the common fields; also return the HTTP names that depend on the request."""
    names = {"stopping.stop_strings[0]": "stop"} if isinstance(body.stop, str) else {}
    request = gateway_pb2.GenerateRequest(
        model=body.model,
        beam_search=_beam_search(body),
        constraint=constraint_of(body, names),
        timeout=_timeout(body.timeout),
    )
    set_declared(request, {name: getattr(body, name) for name in DECLARED} | _converted(body))
    return request, names


def _converted(body: requests.GenerationRequest) -> dict[str, Any]:
    """Convert the values that HTTP writes otherwise than the contract."""
    given = {name: getattr(body, name) for name in _CONVERSIONS}
    return {name: _CONVERSIONS[name](value) for name, value in given.items() if value is not None}


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key) or int(key) > _LAST_ID:
        raise InvalidField(f"logit_bias must have token ids as keys, not {key[:40]!r}", "logit_bias")
    return int(key)


def _top_k(given: int) -> int:
    if given < _ALL:
        raise InvalidField(f"top_k must be at least {_ALL}, not {given}", "top_k")
    return max(0, given)


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "stop": lambda stop: [stop] if isinstance(stop, str) else stop,
    "skip_special_tokens": lambda skip: not skip,
    "top_k": _top_k,
    "logit_bias": lambda biases: {_token_id(token): bias for token, bias in biases.items()},
}


def _beam_search(body: requests.GenerationRequest) -> decoding_pb2.BeamSearch | None:
    """Translate the fields of beam search; `best_of` is its width. Without a search they must be defaults."""
    if body.use_beam_search:
        width = body.n if body.best_of is None else body.best_of
        return decoding_pb2.BeamSearch(
            width=width, length_penalty=body.length_penalty, early_stopping=body.early_stopping
        )
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise UnsupportedField(f"without use_beam_search, best_of must equal n, not {body.best_of}", "best_of")
    if body.length_penalty not in (None, 1.0):
        raise InvalidField("length_penalty requires use_beam_search", "length_penalty")
    if body.early_stopping:
        raise InvalidField("early_stopping requires use_beam_search", "early_stopping")
    return None


def _limit(
    request: gateway_pb2.GenerateRequest,
    body: requests.CompletionRequest | requests.ChatCompletionRequest,
    names: dict[str, str],
) -> None:
    given = {name: getattr(body, name) for name in ("max_tokens", "max_completion_tokens")}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    if len(set(limits.values())) > 1:
        raise InvalidField("max_tokens must equal max_completion_tokens if both are set", "max_tokens")
    for name, limit in limits.items():
        names["stopping.max_tokens"] = name
        request.stopping.max_tokens = limit


def _check_generates(
    request: gateway_pb2.GenerateRequest, body: requests.ChatCompletionRequest, names: dict[str, str]
) -> None:
    """Raise InvalidField for a chat without tokens: an empty message would look like the model's answer."""
    if request.stopping.HasField("max_tokens") and not request.stopping.max_tokens and body.prompt_logprobs is None:
        name = names["stopping.max_tokens"]
        raise InvalidField(f"{name} must be at least 1, not 0", name)


def _timeout(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    if not _TIMEOUT.holds(seconds):
        raise InvalidField(f"timeout must be {_TIMEOUT.bounds()}, not {seconds}", "timeout")
    return duration(seconds)


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[gateway_pb2.Prompt]:
    if isinstance(given, str):
        return [gateway_pb2.Prompt(text=given)]
    if not given:
        raise InvalidField("prompt must not be empty", "prompt")
    if isinstance(given[0], int):
        return [_tokens_prompt(given, "prompt")]
    if len(given) > requests.MAX_PROMPTS:
        raise InvalidField(f"prompt must have at most {requests.MAX_PROMPTS} entries, not {len(given)}", "prompt")
    return [
        gateway_pb2.Prompt(text=one) if isinstance(one, str) else _tokens_prompt(one, f"prompt[{at}]")
        for at, one in enumerate(given)
    ]


def _tokens_prompt(token_ids: Any, path: str) -> gateway_pb2.Prompt:
    """Translate token ids; the vocabulary's size is checked later."""
    if token_ids and (min(token_ids) < -_LAST_ID or max(token_ids) > _LAST_ID):
        at, token = next((at, one) for at, one in enumerate(token_ids) if abs(one) > _LAST_ID)
        field = f"{path}[{at}]"
        raise InvalidField(f"{field} must be a token id between 0 and {_LAST_ID}, not {shown(token)}", field)
    return gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=token_ids))


def _request_id(given: str | None) -> str:
    """Return the client's request id, or a new one. Only characters that are safe in a header are valid."""
    if given is None:
        return new_request_id()
    if not _REQUEST_ID.fullmatch(given):
        bounds = "1 to 100 printable ASCII characters other than the space"
        raise InvalidField(f"request_id must have {bounds}, not {shown(given)}", "request_id")
    return given
