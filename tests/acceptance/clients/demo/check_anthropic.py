"""Messages of the anthropic package with the demo model: a forced call, its result, a stream."""

from typing import Any

import pytest
from anthropic import Anthropic

ASK: Any = {"role": "user", "content": "Which animal is it?"}
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "wild": {"type": "boolean"}},
    "required": ["kind", "wild"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "animal", "description": "Name the animal.", "input_schema": SCHEMA}]
SETTINGS: Any = {"model": "demo", "max_tokens": 80, "tools": TOOLS, "extra_body": {"seed": 4}}


@pytest.fixture
def client(root_url: str) -> Anthropic:
    return Anthropic(base_url=root_url, api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "animal"}])
def test_a_tool_is_called_if_it_must_be(client: Anthropic, choice: Any) -> None:
    arguments = {**SETTINGS, "messages": [ASK], "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    whole = client.messages.create(**arguments)
    (call,) = whole.content
    assert (call.type, whole.stop_reason, call.input["kind"] in ("cat", "dog")) == ("tool_use", "tool_use", True)
    with client.messages.stream(**arguments) as stream:
        (streamed,) = stream.get_final_message().content
    assert (streamed.name, streamed.input) == ("animal", call.input)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Yes."}
    turns = [ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**SETTINGS, "max_tokens": 8}, messages=turns)
    assert answer.usage.output_tokens <= 8
    assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_a_stream_has_the_text_of_the_whole_message(client: Anthropic) -> None:
    arguments: Any = {"model": "demo", "max_tokens": 16, "messages": [ASK], "extra_body": {"seed": 4}}
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
    counted = client.messages.count_tokens(model="demo", messages=[ASK]).input_tokens
    assert counted == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
