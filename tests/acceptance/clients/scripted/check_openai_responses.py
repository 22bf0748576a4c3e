"""The openai package: responses."""

import json
from typing import Any

import openai
import pytest
from check_openai_chat import Train
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
)
from openai import OpenAI

FUNCTIONS: Any = [{"type": "function", "strict": None, **tool} for tool in TOOLS]
LONG: Any = SAID["long_question"]


@pytest.fixture
def client(base_url: str, key: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key=key)


def whole(client: OpenAI, items: list[Any]) -> Any:
    return client.responses.create(model=MODEL, instructions=SYSTEM, input=items, tools=FUNCTIONS)


def streamed(client: OpenAI, items: list[Any]) -> Any:
    with client.responses.stream(model=MODEL, instructions=SYSTEM, input=items, tools=FUNCTIONS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    return final


@pytest.mark.parametrize("answer", [whole, streamed])
def test_three_turns_call_both_tools(client: OpenAI, answer: Any) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    called, texts, thoughts = [], [], []
    for _ in range(3):
        response = answer(client, items)
        assert response.status == "completed"
        assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
        texts.append(response.output_text)
        items += response.output
        for item in response.output:
            if item.type == "reasoning":
                thoughts.append("".join(part.text for part in item.content))
            if item.type == "function_call":
                made = {"name": item.name, "arguments": json.loads(item.arguments)}
                called.append(made)
                result = result_of(made["name"], **made["arguments"])
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})
    assert called == CALLS
    assert texts == [REMARK, "", ANSWER]
    assert thoughts == THOUGHTS
    check_prompt(thoughts=True)
    assert response.usage.input_tokens_details.cached_tokens > 0


def test_an_output_is_parsed(client: OpenAI) -> None:
    made = client.responses.parse(model=MODEL, input=SAID["object_question"], text_format=Train)
    assert made.output_parsed is not None
    assert made.output_parsed.model_dump() == SAID["object"]


def test_a_limit_makes_the_response_incomplete(client: OpenAI) -> None:
    made = client.responses.create(model=MODEL, input=LONG, max_output_tokens=5)
    assert made.status == "incomplete"
    assert made.incomplete_details is not None
    assert made.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_a_bad_request_with_its_code(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=OVERFLOW, stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "input"


def test_a_wrong_key_and_a_spent_key_have_exceptions(base_url: str, spent_key: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=base_url, api_key="wrong").responses.create(model=MODEL, input=LONG)
    with pytest.raises(openai.RateLimitError):
        OpenAI(base_url=base_url, api_key=spent_key).responses.create(model=MODEL, input=LONG)
