"""Chats of the openai package with tools."""

import json
from typing import Any, Literal

import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, ConfigDict

ASK: Any = [{"role": "user", "content": "Which animal is it?"}]


class Animal(BaseModel):
    """Name the animal."""

    model_config = ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    wild: bool


TOOLS: Any = [pydantic_function_tool(Animal)]
SETTINGS: Any = {"model": "demo", "messages": ASK, "tools": TOOLS, "seed": 4}


@pytest.fixture
def client(base_url: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", max_retries=0)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "Animal"}}])
def test_a_tool_is_called_if_it_must_be(client: OpenAI, choice: Any) -> None:
    arguments = {**SETTINGS, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 80}
    whole = client.chat.completions.parse(**arguments).choices[0]
    (call,) = whole.message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Animal)
    assert whole.finish_reason == "tool_calls"
    with client.chat.completions.stream(**arguments) as stream:
        deltas = [one.arguments_delta for one in stream if one.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion().choices[0].message
    assert "".join(deltas) == call.function.arguments
    assert len(deltas) > 3
    assert [one.function.arguments for one in final.tool_calls or ()] == [call.function.arguments]


def test_a_tool_may_be_called(client: OpenAI) -> None:
    message = client.chat.completions.create(**SETTINGS, max_tokens=16).choices[0].message
    assert message.content is not None or message.tool_calls
    for call in message.tool_calls or ():
        assert isinstance(json.loads(call.function.arguments), dict)


def test_a_result_is_sent_back(client: OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "Animal", "arguments": '{"kind": "cat", "wild": true}'}}
    turns = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Yes."},
    ]
    answer = client.chat.completions.create(**{**SETTINGS, "messages": turns}, max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


def test_other_fields_of_the_chat_template_are_sent_as_extra_body(client: OpenAI) -> None:
    turns = [*ASK, {"role": "assistant", "content": "It is a"}]
    body = {"continue_final_message": True, "chat_template_kwargs": {"thinking": False}, "return_token_ids": True}
    answer = client.chat.completions.create(model="demo", messages=turns, max_tokens=4, extra_body=body)
    assert answer.choices[0].message.content is not None
