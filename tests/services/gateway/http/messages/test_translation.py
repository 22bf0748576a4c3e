"""What a request to /v1/messages asks of the gateway."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import gateway_pb2
from services.gateway.http.anthropic.chat_body import chat_body
from services.gateway.http.anthropic.conversation import Conversation
from services.gateway.http.anthropic.request_schemas import MessagesRequest
from services.gateway.http.openai.translation import chat_call
from tests.services.gateway.http.messages.streams import message_of
from tests.services.gateway.http.scripted_server import ScriptedServer

CLAUDE_CODE = json.loads((Path(__file__).parents[1] / "fixtures" / "claude_code_request.json").read_text())
SAID = {"role": "user", "content": "Hi"}
TOOL = {"name": "sum", "input_schema": {"type": "object"}}


def translated(**body: Any) -> gateway_pb2.GenerateRequest:
    asked = MessagesRequest.model_validate({"messages": [SAID], "max_tokens": 8, **body})
    (request,) = chat_call(chat_body(asked, Conversation(asked)), "msg_").generations
    return request


def variables(**body: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(translated(**body).prompt.chat.template_variables or "{}")
    return found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, {"enable_thinking": True, "thinking": True}),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "max"},
        ),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"},
        ),
        ({"chat_template_kwargs": {"style": "short"}}, {"style": "short"}),
    ],
)
def test_thinking_and_effort_become_variables_of_the_template(body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert variables(**body) == expected


def test_the_budget_limits_the_thought() -> None:
    assert translated(thinking={"type": "enabled", "budget_tokens": 7}).thought.max_tokens == 7
    assert not translated(thinking={"type": "adaptive"}).HasField("thought")


def test_sampling_and_stopping_are_those_of_the_body() -> None:
    given = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "stop_sequences": ["a", "b"], "seed": 9, "cache_salt": "s"}
    request = translated(**given)
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 9)
    assert (stopping.max_tokens, list(stopping.stop_strings), request.cache.salt) == (8, ["a", "b"], "s")


def test_examples_of_arguments_are_a_part_of_the_schema() -> None:
    request = translated(tools=[{**TOOL, "description": "Adds.", "input_examples": [{"a": 1}]}])
    (tool,) = request.prompt.chat.tools
    assert (tool.name, tool.description) == ("sum", "Adds.")
    assert json.loads(tool.parameters) == {"type": "object", "examples": [{"a": 1}]}


def test_without_a_choice_of_tools_the_model_gets_none() -> None:
    assert not translated(tools=[TOOL], tool_choice={"type": "none"}).prompt.chat.tools


def test_a_last_message_of_the_assistant_stays_open() -> None:
    request = translated(messages=[SAID, {"role": "assistant", "content": "Yes"}])
    assert request.prompt.chat.continue_final_message
    assert not translated().prompt.chat.continue_final_message


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_claude_code_is_answered_by_a_model_with_thoughts(server: ScriptedServer, stream: bool) -> None:
    call = '<tool_call>{"name": "Bash", "arguments": {"command": "ls"}}</tool_call>'
    server.handler.script = [("<think>Hm.</think>", [1]), ("I list.", [1]), (call, [1])]
    response = server.client.post("/v1/messages?beta=true", json={**CLAUDE_CODE, "stream": stream})
    message = message_of(response) if stream else response.json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    (request,) = server.handler.requests
    roles = [one.role for one in request.prompt.chat.messages]
    assert roles == ["system", "user", "assistant", "tool", "tool"]
    assert "cch=" not in request.prompt.chat.messages[0].content
    assert request.prompt.chat.messages[2].reasoning == "Both at once."
