"""The Anthropic SDK for Python."""

from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from conversation import (
    ANSWER,
    CALLS,
    MODEL,
    OVERFLOW,
    QUESTION,
    REMARK,
    SAID,
    SYSTEM,
    THOUGHTS,
    TOOLS,
    check_prompt,
    result_of,
    trains,
    weather,
)

FUNCTIONS: Any = [
    {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]} for tool in TOOLS
]
LONG: Any = [{"role": "user", "content": SAID["long_question"]}]


@pytest.fixture
def client(root_url: str, key: str) -> Anthropic:
    return Anthropic(base_url=root_url, api_key=key)


def whole(client: Anthropic, messages: list[Any]) -> Any:
    return client.messages.create(model=MODEL, max_tokens=300, system=SYSTEM, messages=messages, tools=FUNCTIONS)


def streamed(client: Anthropic, messages: list[Any]) -> Any:
    with client.messages.stream(
        model=MODEL, max_tokens=300, system=SYSTEM, messages=messages, tools=FUNCTIONS
    ) as stream:
        texts = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert texts == "".join(block.text for block in message.content if block.type == "text")
    return message


@pytest.mark.parametrize("answer", [whole, streamed])
def test_three_turns_call_both_tools(client: Anthropic, answer: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    called, reasons, texts, thoughts = [], [], [], []
    for _ in range(3):
        message = answer(client, messages)
        reasons.append(message.stop_reason)
        assert message.usage.input_tokens > 0
        assert message.usage.output_tokens > 0
        messages.append({"role": "assistant", "content": message.content})
        results = []
        for block in message.content:
            if block.type == "text":
                texts.append(block.text)
            elif block.type == "thinking":
                thoughts.append(block.thinking)
            else:
                called.append({"name": block.name, "arguments": block.input})
                content = result_of(block.name, **block.input)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": content})
        messages += [{"role": "user", "content": results}] * bool(results)
    assert called == CALLS
    assert reasons == ["tool_use", "tool_use", "end_turn"]
    assert texts == [REMARK, ANSWER]
    assert thoughts == THOUGHTS
    check_prompt(thoughts=True)


def test_a_runner_calls_the_tools_itself(client: Anthropic) -> None:
    tools = [anthropic.beta_tool(weather), anthropic.beta_tool(trains)]
    runner = client.beta.messages.tool_runner(
        model=MODEL, max_tokens=300, system=SYSTEM, tools=tools, messages=[{"role": "user", "content": QUESTION}]
    )
    *_, last = runner
    assert [block.text for block in last.content if block.type == "text"] == [ANSWER]
    check_prompt(thoughts=True)


def test_a_limit_ends_the_text_with_max_tokens(client: Anthropic) -> None:
    message = client.messages.create(model=MODEL, max_tokens=5, messages=LONG)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 5


def test_tokens_are_counted(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=LONG).input_tokens
    assert client.messages.create(model=MODEL, max_tokens=5, messages=LONG).usage.input_tokens == counted


def test_refusals_have_the_exceptions_of_the_package(client: Anthropic, root_url: str, spent_key: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(model=MODEL, max_tokens=5, messages=[{"role": "user", "content": OVERFLOW}])
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=root_url, api_key="wrong").messages.create(model=MODEL, max_tokens=5, messages=LONG)
    # With retries it would wait for as long as `retry-after` says.
    waiting = Anthropic(base_url=root_url, api_key=spent_key, max_retries=0)
    with pytest.raises(anthropic.RateLimitError):
        waiting.messages.create(model=MODEL, max_tokens=5, messages=LONG)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="other", max_tokens=5, messages=LONG)
    assert [model.id for model in client.models.list()] == [MODEL]
