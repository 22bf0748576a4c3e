"""Requests to /v1/messages against a running server: what is served, accepted and refused."""

import json
import random
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.http.messages.streams import failure, message_of
from tests.services.gateway.http.test_random_bodies import changed

CLAUDE_CODE = json.loads((Path(__file__).parents[1] / "fixtures" / "claude_code_request.json").read_text())
SAID = {"role": "user", "content": "Hi"}
DIGIT = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}
TOOL = {"name": "sum", "description": "Adds.", "input_schema": DIGIT}
CALL = {"type": "tool_use", "id": "a", "name": "sum", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "1"}
POOL_TOKENS = 64 * 16  # of the tiny server; its context is longer
RANDOM_BODIES = 400
EVERYTHING: dict[str, Any] = {
    "model": "tiny-llama",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Sum.", "citations": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {**CALL, "caller": {"type": "direct"}},
            ],
        },
        {"role": "user", "content": [{**RESULT, "content": [{"type": "text", "text": "1"}], "is_error": False}]},
    ],
    "tools": [{**TOOL, "type": "custom", "strict": True, "input_examples": [{"a": 1}], "allowed_callers": ["direct"]}],
    "tool_choice": {"type": "tool", "name": "sum", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": DIGIT}},
    "context_management": {
        "edits": [{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}]
    },
    "metadata": {"user_id": "me"},
    "stop_sequences": ["~~"],
    "stream": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "service_tier": "auto",
    "inference_geo": None,
    "mcp_servers": [],
    "container": None,
    "seed": 3,
    "cache_salt": "s",
    "priority": 0,
    "chat_template_kwargs": {"a": 1},
}


def ask(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/messages", json={"messages": [SAID], "max_tokens": 8, **body})


def answer(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """Return an answer, after a check that a stream has the same."""
    whole = ask(http, **body)
    assert whole.status_code == 200, whole.text
    message: dict[str, Any] = whole.json()
    streamed = message_of(ask(http, **body, stream=True))
    for name in ("stop_reason", "stop_sequence"):
        assert streamed[name] == message[name]
    for one, other in zip(streamed["content"], message["content"], strict=True):
        assert {**one, "id": ""} == {**other, "id": ""}
    return message


def test_an_answer_counts_its_tokens(http: httpx.Client) -> None:
    message = answer(http, temperature=0, system="Be brief.")
    counted = http.post("/v1/messages/count_tokens", json={"messages": [SAID], "system": "Be brief."})
    usage = message["usage"]
    assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert counted.headers["request-id"]
    assert (message["model"], usage["output_tokens"], message["stop_reason"]) == ("tiny-llama", 8, "max_tokens")


def test_cached_tokens_are_not_among_those_of_the_input(http: httpx.Client) -> None:
    said = {"role": "user", "content": "The same long question again and again. " * 8}
    first, second = (ask(http, messages=[said]).json()["usage"] for _ in range(2))
    assert second["cache_read_input_tokens"] > 0
    both = ("input_tokens", "cache_read_input_tokens")
    assert sum(first[name] for name in both) == sum(second[name] for name in both)


def test_a_beginning_of_the_answer_is_continued(http: httpx.Client) -> None:
    begun = [SAID, {"role": "assistant", "content": "Good"}]
    chat = {"messages": begun, "continue_final_message": True, "max_tokens": 8, "temperature": 0}
    continued = http.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    message = answer(http, messages=begun, temperature=0)
    assert "".join(block["text"] for block in message["content"]) == continued


def test_a_stop_sequence_is_named(http: httpx.Client) -> None:
    text = answer(http, temperature=0)["content"][0]["text"]
    stop = text[2:4]
    message = answer(http, temperature=0, stop_sequences=["never", stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == text[: text.index(stop)]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "sum"}])
def test_a_required_call_follows_its_schema(http: httpx.Client, choice: dict[str, Any]) -> None:
    choice = {**choice, "disable_parallel_tool_use": True}
    message = answer(http, tools=[TOOL], tool_choice=choice, max_tokens=150, seed=4)
    (block,) = message["content"]
    assert (block["type"], block["name"], message["stop_reason"]) == ("tool_use", "sum", "tool_use")
    assert block["input"]["a"] in (1, 2, 3)


@pytest.mark.parametrize("place", [{"output_config": {"format": {}}}, {"output_format": {}}])
def test_an_answer_follows_the_schema_of_its_format(http: httpx.Client, place: dict[str, Any]) -> None:
    given = {"type": "json_schema", "schema": DIGIT}
    body = {"output_format": given} if "output_format" in place else {"output_config": {"format": given}}
    message = answer(http, **body, max_tokens=60, seed=4)
    assert json.loads(message["content"][0]["text"])["a"] in (1, 2, 3)


def test_more_than_fits_is_generated_up_to_the_context(http: httpx.Client) -> None:
    message = answer(http, max_tokens=32000, ignore_eos=True, temperature=0)
    usage = message["usage"]
    total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["output_tokens"]
    assert (message["stop_reason"], total) == ("model_context_window_exceeded", POOL_TOKENS + 1)


@pytest.mark.parametrize("excess", [0, 1, 40, 3000])
def test_a_prompt_that_leaves_no_room_is_refused(http: httpx.Client, excess: int) -> None:
    context, most = http.get("/v1/models").json()["data"][0]["max_model_len"], POOL_TOKENS + 1
    frame = count(http, "x") - 1
    said = "x" * (most + excess - frame)
    tokens = count(http, said)
    assert tokens == most + excess
    refused = failure(ask(http, messages=[{"role": "user", "content": said}]))
    maximum = (most if tokens <= context else context) - 1  # the answer has a token
    expected = f"messages: prompt is too long: {tokens} tokens > {maximum} maximum"
    assert refused == (400, "invalid_request_error", expected)


def count(http: httpx.Client, text: str) -> int:
    counted = http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": text}]})
    size: int = counted.json()["input_tokens"]
    return size


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_claude_code_is_answered(http: httpx.Client, stream: bool) -> None:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,effort-2025-11-24,unknown",
        "x-api-key": "none",
        "user-agent": "claude-cli/2.1.165 (external, cli)",
        "x-stainless-helper-method": "stream",
    }
    body = {**CLAUDE_CODE, "model": "tiny-llama", "stream": stream, "max_tokens": 32000}
    for path in ("/v1/messages?beta=true", "/v1/messages/count_tokens?beta=true"):
        response = http.post(path, json=body, headers=headers)
        assert response.status_code == 200, response.text
        if path.startswith("/v1/messages?"):
            message = message_of(response) if stream else response.json()
            assert message["content"]


REFUSED = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
    ({"messages": [SAID, {"role": "assistant", "content": [CALL]}]}, "messages[1].content[0]"),
    (
        {
            "messages": [
                SAID,
                {"role": "assistant", "content": [{**CALL, "name": ""}]},
                {"role": "user", "content": [RESULT]},
            ]
        },
        "messages[1].content[0].name",
    ),
    (
        {
            "messages": [
                SAID,
                {"role": "assistant", "content": [CALL]},
                {"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]},
            ]
        },
        "messages[2].content[0].content[0].type",
    ),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"stop_sequences": ["x"] * 65}, "stop_sequences"),
    ({"top_k": -2}, "top_k"),
    ({"top_p": 0}, "top_p"),
    ({"temperature": "hot"}, "temperature"),
    ({"min_tokens": 50}, "min_tokens"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [TOOL, {**TOOL, "name": "b", "input_schema": {"type": "array"}}]}, "tools[1].input_schema"),
    ({"tools": [TOOL, {"name": "b"}]}, "tools[1].input_schema"),
    ({"tools": [{**TOOL, "defer_loading": True}]}, "tools[0].defer_loading"),
    (
        {"tools": [{**TOOL, "input_schema": {"additionalProperties": 5}}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
    ({"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}, "guided_regex": "a"}, "tool_choice"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format.schema"),
    ({"output_format": {"type": "json_schema", "schema": {"type": 3}}}, "output_format.schema"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 1}}}, "output_config.task_budget"),
    ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
    ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"inference_geo": "us"}, "inference_geo"),
    ({"n": 2}, "n"),
    ({"stop": "x"}, "stop"),
    ({"unknown": 1}, "unknown"),
    ({"request_id": "two words"}, "request_id"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED)
def test_a_refusal_names_the_field_of_the_body(http: httpx.Client, body: dict[str, Any], field: str) -> None:
    given = {name: value for name, value in {"messages": [SAID], "max_tokens": 8, **body}.items() if value is not None}
    status, kind, message = failure(http.post("/v1/messages", json=given))
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith(field), message


def test_an_unknown_model_is_not_found(http: httpx.Client) -> None:
    status, kind, message = failure(ask(http, model="claude-opus-4-6"))
    assert (status, kind) == (404, "not_found_error")
    assert "claude-opus-4-6" in message


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_no_body_is_a_server_error_and_every_refusal_names_a_field(http: httpx.Client, path: str) -> None:
    source = random.Random(70)
    assert (unchanged := http.post(path, json=EVERYTHING)).status_code == 200, unchanged.text
    statuses = set[int]()
    for _ in range(RANDOM_BODIES):
        body = changed(deepcopy(EVERYTHING), source)
        response = http.post(path, json=body)
        statuses.add(response.status_code)
        assert response.status_code in (200, 400, 404), (response.text, body)
        if response.status_code != 200:
            message = failure(response)[2]
            first = message.split()[0].rstrip(":").strip('"').split("[")[0].split(".")[0]
            assert first in {*EVERYTHING, "unknown"}, (message, body)
    assert statuses >= {200, 400}
