"""The Responses API over HTTP: its rejections, and what its requests have in common with chats."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.dialects.declarations import DEFAULT_CALLS
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser
from services.gateway.http.openai.dialect_deltas import DialectDeltas
from services.gateway.http.openai.responses_api.output_items import OutputItems
from services.runtime.errors import DeadlineExceeded, GenerationFailed, Overloaded
from tests.running_quire import RunningQuire
from tests.services.gateway.http.responses import rejection
from tests.services.gateway.http.scripted_server import ScriptedServer

TOOL = {"type": "function", "name": "sum", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "1", "name": "sum", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "2"}
SAID = {"role": "user", "content": "Hi"}


def post(http: httpx.Client, **body: Any) -> httpx.Response:
    return http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 8, **body})


def streamed(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of all events, after a check that their names and numbers are as in their data."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for number, block in enumerate(response.text.removesuffix("\n\n").split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert (name, number) == (f"event: {found[-1]['type']}", found[-1]["sequence_number"])
    return found


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].call_id"),
        ({"input": [SAID, {**CALL, "name": ""}, RESULT]}, "input[1].name"),
        ({"input": [SAID, {**CALL, "name": ""}, RESULT], "instructions": "x"}, "input[1].name"),
        ({"input": [SAID, CALL, SAID, RESULT, {**CALL, "name": ""}, RESULT]}, "input[4].name"),
        (
            {
                "input": [
                    SAID,
                    CALL,
                    {**CALL, "name": "", "call_id": "2"},
                    {**RESULT, "call_id": "2"},
                    RESULT,
                ]
            },
            "input[2].name",
        ),
        ({"use_beam_search": True, "include": ["message.output_text.logprobs"]}, "include"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"min_tokens": 50}, "min_tokens"),
        ({"top_p": 0}, "top_p"),
        ({"model": "tiny-llama:adapter"}, "model"),
        ({"request_id": "two words"}, "request_id"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL, {**TOOL, "name": ""}]}, "tools[1].name"),
        ({"tools": [TOOL, {**TOOL, "name": ""}], "tool_choice": "required"}, "tools[1].name"),
        ({"tools": [TOOL, {**TOOL, "parameters": {"type": "array"}}]}, "tools[1].parameters"),
        (
            {
                "tools": [TOOL, {**TOOL, "name": "other", "parameters": {"additionalProperties": 5}}],
                "tool_choice": "required",
            },
            "tools[1].parameters",
        ),
        ({"input": "x " * 3000}, "input"),
        ({"input": "x " * 1010}, "max_output_tokens"),
    ],
)
def test_a_rejection_names_the_field_of_the_responses_api(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = post(http, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param), error
    assert param in error["message"]
    assert "input.input" not in error["message"]
    chat_words = ("messages", "response_format", "max_completion_tokens", "max_tokens", "function.")
    assert not any(word in error["message"].split("not {")[0] for word in chat_words), error["message"]


def test_an_input_is_rendered_as_the_chat_with_the_same_messages(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    items = [
        {"role": "developer", "content": "Count."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Well.", "annotations": []}]},
        {**CALL, "arguments": '{"a": 1}', "id": "fc_1", "status": "completed"},
        {**CALL, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "2"}]},
        {"type": "function_call_output", "call_id": "2", "output": "3"},
    ]
    calls = [
        {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}},
        {"id": "2", "type": "function", "function": {"name": "sum", "arguments": "{}"}},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Count."},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "Well.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "tool", "tool_call_id": "2", "content": "3"},
    ]
    tools = [{"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}]
    common = {"seed": 3, "temperature": 0.5, "top_k": 50, "ignore_eos": True}
    chat = http.post(
        "/v1/chat/completions",
        json={"messages": messages, "tools": tools, "tool_choice": "auto", "max_tokens": 8, **common},
    ).json()
    made = post(http, instructions="Be brief.", input=items, tools=[TOOL], tool_choice="auto", **common).json()
    assert made["output"][0]["content"][0]["text"] == chat["choices"][0]["message"]["content"]
    assert made["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert (made["tools"][0]["name"], made["tool_choice"], made["temperature"]) == ("sum", "auto", 0.5)


def test_the_id_of_a_response_is_that_of_its_explanation(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2, "request_id": "mine"})
    assert answer.headers["x-request-id"] == answer.json()["id"] == "resp_mine"
    tiny_quire.output.wait_for("resp_mine")  # the gateway's log of the request


def test_calls_in_the_models_format_become_items_in_order(http: httpx.Client) -> None:
    text = r'<tool_call>\{"name": "sum", "arguments": \{"a": [123]\}\}</tool_call>'
    body: dict[str, Any] = {"tools": [TOOL], "guided_regex": f"Well: {text}{text}", "max_output_tokens": 150, "seed": 4}
    made = post(http, **body).json()
    assert [item["type"] for item in made["output"]] == ["message", "function_call", "function_call"]
    assert (made["output"][0]["content"][0]["text"], made["status"]) == ("Well:", "completed")
    events = streamed(post(http, **body, stream=True))
    kinds = [event["type"] for event in events]
    assert [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        *(
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        )
        * 2,
        "response.completed",
    ]


def test_a_required_call_that_the_limit_cuts_is_incomplete_and_has_the_arguments_so_far(http: httpx.Client) -> None:
    tool = {**TOOL, "parameters": {"type": "object", "properties": {"a": {"const": "x" * 20}}, "required": ["a"]}}
    whole = '{"a": "' + "x" * 20 + '"}'
    statuses = []
    for limit in range(1, 100, 6):
        body: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "max_output_tokens": limit, "seed": 4}
        body["parallel_tool_calls"] = False
        made = post(http, **body).json()
        *_, last = streamed(post(http, **body, stream=True))
        (item,), (same,) = made["output"], last["response"]["output"]
        assert (last["type"], same["status"]) == (f"response.{made['status']}", item["status"])
        if item["type"] == "message":
            assert item["content"][0]["text"] == same["content"][0]["text"] == ""
        else:
            assert item["arguments"] == same["arguments"]
            assert whole.replace(" ", "").startswith(item["arguments"].replace(" ", ""))
        if item["status"] != "completed":
            assert made["incomplete_details"] == {"reason": "max_output_tokens"}
        statuses.append((made["status"], item["type"], item["status"]))
    assert statuses[0] == ("incomplete", "message", "incomplete")
    assert ("incomplete", "function_call", "incomplete") in statuses
    assert statuses[-1] == ("completed", "function_call", "completed")


def test_a_complete_call_of_an_incomplete_response_is_completed() -> None:
    parser = DialectParser(Dialect(calls=DEFAULT_CALLS), OfferedTools({"a": {}}), drops_text=True)
    items = OutputItems("x", DialectDeltas(parser))
    items.push('<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{"na')
    items.finish("incomplete")
    assert [(item["arguments"], item["status"]) for item in items.items] == [("{}", "completed")]


# Errors, with a handler whose output the test sets.


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], Path]) -> Iterator[ScriptedServer]:
    with closing(ScriptedServer(tiny_model("llama"))) as one:
        yield one


@pytest.fixture(autouse=True)
def _reset(server: ScriptedServer) -> Iterator[None]:
    yield
    server.handler.rejection = server.handler.failure = None
    server.settle()
    assert server.handler.running == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_rejected_response_has_the_status_of_its_error(server: ScriptedServer, stream: bool) -> None:
    server.handler.rejection = Overloaded("the queue is full", retry_seconds=2.5)
    answer = post(server.client, stream=stream)
    assert rejection(answer) == (429, "overloaded")
    assert answer.headers["retry-after"] == "3"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (GenerationFailed("a step failed"), "server_error", "a step failed"),
        (DeadlineExceeded("the deadline passed"), "server_error", "the deadline passed"),
        (ZeroDivisionError("secret"), "server_error", "internal server error; see the log of the gateway"),
    ],
)
def test_an_error_in_mid_stream_ends_it_with_a_failed_response(
    server: ScriptedServer, error: Exception, code: str, message: str
) -> None:
    server.handler.failure = error
    *before, last = streamed(post(server.client, stream=True))
    assert "response.output_text.delta" in [event["type"] for event in before]
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]) == ("failed", {"code": code, "message": message})


def test_a_disconnected_client_ends_its_response(server: ScriptedServer) -> None:
    server.call(server.handler.hold.clear)
    try:
        body = {"input": "Hi", "max_output_tokens": 8, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/responses", json=body) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: response.created"
            assert server.handler.running == 1
        server.settle()
        assert server.handler.running == 0
    finally:
        server.call(server.handler.hold.set)


def test_a_response_without_text_has_an_empty_message(server: ScriptedServer) -> None:
    server.handler.text = ""
    try:
        plain, events = post(server.client).json(), streamed(post(server.client, stream=True))
    finally:
        server.handler.text = "x"
    assert [item["content"][0]["text"] for item in plain["output"]] == [""]
    assert [item["content"][0]["text"] for item in events[-1]["response"]["output"]] == [""]
