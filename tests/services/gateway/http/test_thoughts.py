"""Thoughts in answers over HTTP, with a handler whose output the test sets."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.http.responses import events
from tests.services.gateway.http.scripted_server import ScriptedServer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "</{{ m.role }}>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
ASK = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_model("llama"), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    with closing(ScriptedServer(folder)) as one:
        yield one


def play(server: ScriptedServer, *texts: str, in_thought: bool = False) -> None:
    """Let the model write these texts."""
    tokenizer = server.handler.own_tokenizer
    server.handler.script = [(text, tokenizer.encode_parts([text])[0]) for text in texts]
    server.handler.in_thought = in_thought


def answer(server: ScriptedServer, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return choice and usage of a response, after a check that a stream has the same."""
    given = {**ASK, **body}
    response = server.client.post("/v1/chat/completions", json=given).json()
    choice, usage = response["choices"][0], response["usage"]
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = events(server.client.post("/v1/chat/completions", json={**given, **options}))
    joined: dict[str, Any] = {}
    for chunk in chunks:
        for name, text in chunk["choices"][0]["delta"].items():
            if name != "tool_calls" and isinstance(text, str):
                joined[name] = joined.get(name, "") + text
    message = choice["message"]
    assert joined.pop("role").startswith("assistant")
    assert {name: text for name, text in joined.items() if text} == {
        name: text for name, text in message.items() if isinstance(text, str) and name != "role" and text
    }
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert last["usage"] == usage
    assert chunks[-1]["usage"] == usage
    return choice, usage


def reasoning_tokens(usage: dict[str, Any]) -> int:
    return int(usage["completion_tokens_details"]["reasoning_tokens"])


def test_a_thought_has_both_names_and_its_tokens_are_counted(server: ScriptedServer) -> None:
    play(server, "<think>", "\nI ", "see.", "\n</think>", "\n\nYes.")
    choice, usage = answer(server)
    message = choice["message"]
    assert message["content"] == "Yes."
    assert message["reasoning"] == message["reasoning_content"] == "I see."
    assert reasoning_tokens(usage) == len(server.handler.own_tokenizer.encode_parts(["I see."])[0])


def test_a_thought_that_the_prompt_has_begun_is_one(server: ScriptedServer) -> None:
    play(server, "I see.", "</think>Yes.", in_thought=True)
    choice, _ = answer(server)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("Yes.", "I see.")
    play(server, "I see", in_thought=True)
    choice, _ = answer(server)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "I see")


def test_thoughts_can_be_left_out(server: ScriptedServer) -> None:
    play(server, "<think>I see.</think>Yes.")
    choice, usage = answer(server, include_reasoning=False)
    assert choice["message"]["content"] == "Yes."
    assert "reasoning" not in choice["message"]
    assert reasoning_tokens(usage) > 0


def test_a_call_follows_a_thought(server: ScriptedServer) -> None:
    play(server, "<think>I see.</think>\n", CALL)
    choice, _ = answer(server, tools=TOOLS)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning"] == "I see."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    assert server.handler.parsed[-1] == ("hermes", 1, {})


def test_an_output_without_a_thought_is_text_and_has_no_tokens_of_thoughts(server: ScriptedServer) -> None:
    play(server, "Yes.")
    choice, usage = answer(server)
    assert choice["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}
    assert reasoning_tokens(usage) == 0


def test_a_constrained_output_follows_a_thought(server: ScriptedServer) -> None:
    play(server, "I see.</think>", "\n\nyes", in_thought=True)
    choice, _ = answer(server, guided_choice=["yes"])
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("yes", "I see.")
    assert server.handler.requests[-1].HasField("thought")
    play(server, "I see.</think>" + CALL, in_thought=True)
    choice, _ = answer(server, tools=TOOLS, tool_choice="required")
    assert choice["message"]["reasoning"] == "I see."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"


def test_a_budget_of_tokens_is_that_of_the_thought(server: ScriptedServer) -> None:
    play(server, "Yes.")
    answer(server, thinking_token_budget=7)
    assert server.handler.requests[-1].thought.max_tokens == 7
    answer(server)
    assert not server.handler.requests[-1].HasField("thought")


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        ({}, {}),
        ({"enable_thinking": False}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "thinking": False}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "thinking": True, "reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": 3}},
            {"enable_thinking": True, "thinking": 3, "reasoning_effort": "low"},
        ),
    ],
)
def test_efforts_and_switches_are_variables_of_the_template(
    server: ScriptedServer, given: dict[str, Any], variables: dict[str, Any]
) -> None:
    play(server, "Yes.")
    answer(server, **given)
    sent = server.handler.requests[-1].prompt.chat.template_variables
    assert (json.loads(sent) if sent else {}) == variables


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("content", ["Yes.", None])
def test_thoughts_of_earlier_messages_reach_the_template(
    server: ScriptedServer, name: str, content: str | None
) -> None:
    play(server, "Yes.")
    earlier = {"role": "assistant", "content": content, name: "I see."}
    answer(server, messages=[ASK["messages"][0], earlier, ASK["messages"][0]])
    message = server.handler.requests[-1].prompt.chat.messages[1]
    assert (message.reasoning, message.content) == ("I see.", content or "")
    answer(server, messages=[ASK["messages"][0], {"role": "assistant", "content": "Yes.", name: None}])


@pytest.mark.parametrize("arguments", [{}, {"arguments": None}, {"arguments": ""}])
def test_an_earlier_call_may_have_no_arguments(server: ScriptedServer, arguments: dict[str, Any]) -> None:
    play(server, "Yes.")
    call = {"id": "1", "type": "function", "function": {"name": "now", **arguments}}
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer(server, messages=[ASK["messages"][0], calling, {"role": "tool", "tool_call_id": "1", "content": "9:00"}])


def test_a_response_has_an_item_for_its_thought(server: ScriptedServer) -> None:
    play(server, "<think>I ", "see.</think>", "Yes.")
    body = {"input": "Hi", "max_output_tokens": 9}
    whole = server.client.post("/v1/responses", json=body).json()
    reasoning, message = whole["output"]
    assert (reasoning["type"], reasoning["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "I see."}])
    assert (message["type"], message["content"][0]["text"]) == ("message", "Yes.")
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    again = {"input": [{"role": "user", "content": "Hi"}, *whole["output"], {"role": "user", "content": "Why?"}]}
    assert server.client.post("/v1/responses", json={**body, **again}).json()["status"] == "completed"
    assert [one.reasoning for one in server.handler.requests[-1].prompt.chat.messages] == ["", "I see.", ""]
    streamed = server.client.post("/v1/responses", json={**body, "stream": True}).text
    data = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")]
    parts = [one["delta"] for one in data if one["type"] == "response.reasoning_text.delta"]
    assert "".join(parts) == "I see."
    assert [item["type"] for item in data[-1]["response"]["output"]] == ["reasoning", "message"]
