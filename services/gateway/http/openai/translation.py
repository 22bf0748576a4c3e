"""Requests of HTTP into the one request type that the gateway knows."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.duration_pb2 import Duration

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.http.openai import requests
from services.gateway.parameters import MOST_TIMEOUT_SECONDS, new_request_id
from services.gateway.text.tool_choice import arguments_schema, calls_schema
from services.runtime.errors import InvalidField, UnsupportedField
from services.wire.duration import duration

_DEFAULT_COMPLETION_TOKENS = 16
_ALL = -1  # what vLLM's users say for top_k
_LAST_ID = 2**31 - 1
_LANGUAGES = ("json_schema", "regex", "json_object")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_SYNTAX = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_REQUEST_ID = re.compile(r"[!-~]{1,100}")

# What the gateway calls by another name than HTTP; longer paths first.
_NAMES = {
    "sampling.sample_count": "n",
    "sampling": "",
    "logit_rules": "",
    "beam_search.width": "best_of",
    "beam_search": "use_beam_search",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.early_stopping": "early_stopping",
    "stopping.stop_strings": "stop",
    "stopping.include_stop": "include_stop_str_in_output",
    "stopping": "",
    "output.special_tokens": "skip_special_tokens",
    "output": "",
    "cache.salt": "cache_salt",
    "prompt.text": "prompt",
    "prompt.token_ids.ids": "prompt",
    "prompt.token_ids": "prompt",
    "prompt.chat.tools": "tools",
    "prompt.chat.messages": "messages",
    "prompt.chat": "messages",
    "token_ids": "tokens",
}
_PATH = re.compile(r"(?<![\w.])[a-z_]+(?:\.[a-z_]+)*")


@dataclass(frozen=True)
class FieldNames:
    """What a request's fields are called in HTTP. `own` are those that differ from request to request."""

    own: dict[str, str] = field(default_factory=dict)

    def of(self, path: str) -> str:
        """Return the name for a path of the gateway's, or the path itself where both agree."""
        return _PATH.sub(lambda match: self._name(match[0]), path, count=1)

    def within(self, message: str) -> str:
        """Return a message of the gateway's with its paths in HTTP's names."""
        return _PATH.sub(lambda match: self._name(match[0]) if "." in match[0] else match[0], message)

    def _name(self, path: str) -> str:
        names = _NAMES | self.own
        for known in sorted(names, key=len, reverse=True):
            if path == known and names[known]:
                return names[known]
            if path.startswith(f"{known}."):
                return f"{names[known]}.{path.removeprefix(f'{known}.')}".removeprefix(".")
        return path


@dataclass(frozen=True)
class Call:
    """A request of HTTP: its name, one generation for each prompt, and what its fields are called."""

    name: str
    generations: list[gateway_pb2.GenerateRequest]
    names: FieldNames


def completion_call(body: requests.CompletionRequest, request_id: str | None) -> Call:
    """Translate the body of /v1/completions; `request_id` is the header's. Raises InvalidField or UnsupportedField."""
    common, names = _common(body)
    common.stopping.max_tokens = _DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.logprobs is not None:
        common.output.logprobs = body.logprobs
    prompts, name = _prompts(body.prompt), f"cmpl-{_request_id(body.request_id, request_id)}"
    generations = [gateway_pb2.GenerateRequest(prompt=prompt) for prompt in prompts]
    for at, generation in enumerate(generations):
        generation.MergeFrom(common)
        generation.request_id = name if len(prompts) == 1 else f"{name}-{at}"
    return Call(name, generations, FieldNames(names))


def chat_call(body: requests.ChatCompletionRequest, request_id: str | None) -> Call:
    """Translate the body of /v1/chat/completions, as `completion_call` does."""
    common, names = _common(body)
    common.request_id = f"chatcmpl-{_request_id(body.request_id, request_id)}"
    tools = [] if body.tool_choice == "none" else body.tools or []
    common.prompt.chat.CopyFrom(chat(body.messages, tools))
    _limit_chat(common, body, names)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidField("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.logprobs:
        names["output.logprobs"] = "top_logprobs"
        common.output.logprobs = body.top_logprobs or 0
    _require_tools(common, body, names)
    return Call(common.request_id, [common], FieldNames(names))


def own_id(given: str | None) -> str:
    """Return what a client calls a request that is not read, or where that is no id, one of our own."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else new_request_id()


def chat(messages: Sequence[requests.ChatMessage], tools: Sequence[requests.Tool]) -> gateway_pb2.Chat:
    """Translate a conversation. Raises InvalidField or UnsupportedField."""
    return gateway_pb2.Chat(
        messages=[_message(message, f"messages[{at}]") for at, message in enumerate(messages)],
        tools=[_tool(tool) for tool in tools],
    )


def _common(body: requests.Generation) -> tuple[gateway_pb2.GenerateRequest, dict[str, str]]:
    """Translate what both ways to generate have; also return the names of fields that have several."""
    names: dict[str, str] = {}
    request = gateway_pb2.GenerateRequest(
        model=body.model,
        sampling=_sampling(body),
        logit_rules=_logit_rules(body),
        beam_search=_beam_search(body),
        constraint=_constraint(body, names),
        stopping=_stopping(body),
        output=gateway_pb2.OutputOptions(
            prompt_logprobs=body.prompt_logprobs,
            special_tokens=None if body.skip_special_tokens is None else not body.skip_special_tokens,
        ),
        cache=gateway_pb2.CacheOptions(salt=body.cache_salt or ""),
        priority=body.priority,
        timeout=_timeout(body.timeout),
    )
    return request, names


def _sampling(body: requests.Generation) -> decoding_pb2.Sampling:
    return decoding_pb2.Sampling(
        temperature=body.temperature,
        top_k=0 if body.top_k == _ALL else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        seed=body.seed,
        sample_count=body.n,
    )


def _logit_rules(body: requests.Generation) -> decoding_pb2.LogitRules:
    return decoding_pb2.LogitRules(
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias={_token_id(token): bias for token, bias in (body.logit_bias or {}).items()},
        allowed_token_ids=body.allowed_token_ids,
    )


def _token_id(key: str) -> int:
    """Read a key of JSON, which has no numbers for keys."""
    if not _TOKEN_ID.fullmatch(key) or int(key) > _LAST_ID:
        raise InvalidField(f"logit_bias has the key {key[:40]!r}, which is no token id", "logit_bias")
    return int(key)


def _beam_search(body: requests.Generation) -> decoding_pb2.BeamSearch | None:
    """Take `best_of` as the width of a search; without a search, what is for one must not change anything."""
    if body.use_beam_search:
        width = body.n if body.best_of is None else body.best_of
        return decoding_pb2.BeamSearch(
            width=width, length_penalty=body.length_penalty, early_stopping=body.early_stopping
        )
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise UnsupportedField(f"best_of is {body.best_of}: without use_beam_search it must be n", "best_of")
    if body.length_penalty not in (None, 1.0):
        raise InvalidField("length_penalty needs use_beam_search", "length_penalty")
    if body.early_stopping:
        raise InvalidField("early_stopping needs use_beam_search", "early_stopping")
    return None


def _stopping(body: requests.Generation) -> decoding_pb2.Stopping:
    return decoding_pb2.Stopping(
        min_tokens=body.min_tokens,
        stop_strings=[body.stop] if isinstance(body.stop, str) else body.stop,
        stop_token_ids=body.stop_token_ids,
        include_stop=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
    )


def _limit_chat(
    request: gateway_pb2.GenerateRequest, body: requests.ChatCompletionRequest, names: dict[str, str]
) -> None:
    given = {name: getattr(body, name) for name in ("max_tokens", "max_completion_tokens")}
    limits = {name: limit for name, limit in given.items() if limit is not None}
    if len(set(limits.values())) > 1:
        raise InvalidField("max_tokens and max_completion_tokens are the same limit and differ", "max_tokens")
    for name, limit in limits.items():
        names["stopping.max_tokens"] = name
        request.stopping.max_tokens = limit


def _timeout(seconds: float | None) -> Duration | None:
    if seconds is None:
        return None
    if not 0 < seconds <= MOST_TIMEOUT_SECONDS:
        raise InvalidField(f"timeout is {seconds}, it must be above 0 and at most {MOST_TIMEOUT_SECONDS}", "timeout")
    return duration(seconds)


def _constraint(body: requests.Generation, names: dict[str, str]) -> decoding_pb2.OutputConstraint | None:
    """Return the one language that the answer must belong to, and remember what its fields are called."""
    languages = [*_response_format(body), *_guided(body), *_structured(body)]
    if len(languages) > 1:
        raise InvalidField(f"{languages[1][0]} cannot be given together with {languages[0][0]}", languages[1][0])
    if not languages:
        return None
    name, language = languages[0]
    names |= {f"constraint.{kind}": name for kind in _LANGUAGES} | {"constraint": name}
    return language


def _response_format(body: requests.Generation) -> Iterator[tuple[str, decoding_pb2.OutputConstraint]]:
    if body.response_format is None:
        return
    match body.response_format.type:
        case "json_object":
            yield "response_format", decoding_pb2.OutputConstraint(json_object=True)
        case "json_schema":
            given = body.response_format.json_schema
            if given is None:
                raise InvalidField("response_format.json_schema is missing", "response_format.json_schema")
            any_object = decoding_pb2.OutputConstraint(json_object=True)
            language = any_object if given.schema_ is None else _schema(given.schema_)
            yield "response_format.json_schema.schema", language


def _guided(body: requests.Generation) -> Iterator[tuple[str, decoding_pb2.OutputConstraint]]:
    if body.guided_json is not None:
        yield "guided_json", _schema(body.guided_json)
    if body.guided_regex is not None:
        yield "guided_regex", decoding_pb2.OutputConstraint(regex=body.guided_regex)
    if body.guided_choice is not None:
        yield "guided_choice", _choice(body.guided_choice, "guided_choice")


def _structured(body: requests.Generation) -> Iterator[tuple[str, decoding_pb2.OutputConstraint]]:
    given, path = body.structured_outputs, "structured_outputs"
    if given is None:
        return
    if given.json_ is not None:
        yield f"{path}.json", _schema(given.json_)
    if given.regex is not None:
        yield f"{path}.regex", decoding_pb2.OutputConstraint(regex=given.regex)
    if given.choice is not None:
        yield f"{path}.choice", _choice(given.choice, f"{path}.choice")
    if given.json_object:
        yield f"{path}.json_object", decoding_pb2.OutputConstraint(json_object=True)


def _schema(schema: requests.Schema | str | bool) -> decoding_pb2.OutputConstraint:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return decoding_pb2.OutputConstraint(json_schema=text)


def _choice(texts: list[str], name: str) -> decoding_pb2.OutputConstraint:
    if not all(texts) or not texts:
        raise InvalidField(f"{name} must have texts, none of them empty", name)
    return decoding_pb2.OutputConstraint(regex="|".join(_SYNTAX.sub(r"\\\g<0>", text) for text in texts))


def _require_tools(
    request: gateway_pb2.GenerateRequest, body: requests.ChatCompletionRequest, names: dict[str, str]
) -> None:
    """Let the answer be what a required call has to be."""
    choice, tools = body.tool_choice, list(request.prompt.chat.tools)
    if isinstance(choice, requests.NamedTool):
        tools = [tool for tool in tools if tool.name == choice.function.name]
        schema = arguments_schema(tools[0]) if tools else ""
    elif choice == "required":
        schema = calls_schema(tools, parallel=body.parallel_tool_calls is not False) if tools else ""
    else:
        return
    if not tools:
        raise InvalidField("tool_choice asks for a tool that tools does not have", "tool_choice")
    if request.HasField("constraint"):
        raise InvalidField(f"tool_choice cannot be given together with {names['constraint']}", "tool_choice")
    request.constraint.json_schema = schema
    names |= {"constraint": "tools", "constraint.json_schema": "tools"}


def _message(message: requests.ChatMessage, path: str) -> gateway_pb2.ChatMessage:
    if message.content is None and not message.tool_calls:
        raise InvalidField(f"{path}.content is missing", f"{path}.content")
    return gateway_pb2.ChatMessage(
        role=message.role,
        content=_text(message.content, f"{path}.content"),
        tool_calls=[
            gateway_pb2.ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ],
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
    )


def _text(content: str | list[requests.ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for at, part in enumerate(content):
        if part.type != "text":
            raise UnsupportedField(f"{path}[{at}].type is {part.type!r}, text alone is served", f"{path}[{at}].type")
        if part.text is None:
            raise InvalidField(f"{path}[{at}].text is missing", f"{path}[{at}].text")
        if unknown := [*(part.model_extra or ())]:
            raise UnsupportedField(f"{path}[{at}].{unknown[0]} is not served", f"{path}[{at}].{unknown[0]}")
    return "".join(part.text or "" for part in content)


def _tool(tool: requests.Tool) -> gateway_pb2.Tool:
    function = tool.function
    parameters = "" if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
    return gateway_pb2.Tool(name=function.name, description=function.description or "", parameters=parameters)


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> list[gateway_pb2.Prompt]:
    if isinstance(given, str):
        return [gateway_pb2.Prompt(text=given)]
    if not given:
        raise InvalidField("prompt is empty", "prompt")
    if isinstance(given[0], int):
        return [_tokens_prompt(given)]
    if len(given) > requests.MOST_PROMPTS:
        raise InvalidField(f"prompt has {len(given)} entries, the most is {requests.MOST_PROMPTS}", "prompt")
    return [gateway_pb2.Prompt(text=one) if isinstance(one, str) else _tokens_prompt(one) for one in given]


def _tokens_prompt(token_ids: Any) -> gateway_pb2.Prompt:
    return gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=token_ids))


def _request_id(in_body: str | None, in_header: str | None) -> str:
    """Return what the client calls the request, or a name of our own. It comes back in a header."""
    name = in_header if in_body is None else in_body
    if name is None:
        return new_request_id()
    if not _REQUEST_ID.fullmatch(name):
        raise InvalidField(
            "request_id must have 1 to 100 characters of ASCII, without blanks and control characters", "request_id"
        )
    return name
