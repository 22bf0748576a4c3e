"""The openai package: chats."""

import json
from typing import Any

import openai
import pytest
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
from pydantic import BaseModel

FUNCTIONS: Any = [{"type": "function", "function": tool} for tool in TOOLS]
START: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
LONG: Any = [{"role": "user", "content": SAID["long_question"]}]


class Stop(BaseModel):
    city: str


class Train(BaseModel):
    number: int
    stops: list[Stop]
    night: bool


@pytest.fixture
def client(base_url: str, key: str) -> OpenAI:
    return OpenAI(base_url=base_url, api_key=key)


def whole(client: OpenAI, messages: list[Any]) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, tools=FUNCTIONS)


def streamed(client: OpenAI, messages: list[Any]) -> Any:
    with client.chat.completions.stream(
        model=MODEL, messages=messages, tools=FUNCTIONS, stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == (final.choices[0].message.content or "")
    return final


@pytest.mark.parametrize("answer", [whole, streamed])
def test_three_turns_call_both_tools(client: OpenAI, answer: Any) -> None:
    messages, called, reasons, thoughts = [*START], [], [], []
    for _ in range(3):
        completion = answer(client, messages)
        (choice,) = completion.choices
        reasons.append(choice.finish_reason)
        thoughts.append(getattr(choice.message, "reasoning_content", None))
        usage = completion.usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        assert (usage.completion_tokens_details.reasoning_tokens > 0) == bool(thoughts[-1])
        messages.append(choice.message)
        for call in choice.message.tool_calls or ():
            made = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
            called.append(made)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result_of(made["name"], **made["arguments"])}
            )
    assert called == CALLS
    assert reasons == ["tool_calls", "tool_calls", "stop"]
    assert thoughts == [*THOUGHTS, None]
    texts = [message.content or None for message in messages if not isinstance(message, dict)]
    assert texts == [REMARK, None, ANSWER]
    check_prompt(thoughts=True)
    assert usage.prompt_tokens_details.cached_tokens > 0


def test_chunks_add_up_to_the_message(client: OpenAI) -> None:
    chunks = [*client.chat.completions.create(model=MODEL, messages=START, tools=FUNCTIONS, stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == REMARK
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == THOUGHTS[0]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    assert (calls[0].function.name, calls[0].index) == (CALLS[0]["name"], 0)
    assert json.loads("".join(call.function.arguments or "" for call in calls)) == CALLS[0]["arguments"]
    assert len(deltas) > 1


def test_an_output_is_parsed(client: OpenAI) -> None:
    asked: Any = [{"role": "user", "content": SAID["object_question"]}]
    made = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Train)
    parsed = made.choices[0].message.parsed
    assert parsed is not None
    assert parsed.model_dump() == SAID["object"]


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_a_limit_ends_the_text_with_length(client: OpenAI, limit: str) -> None:
    made = client.chat.completions.create(model=MODEL, messages=LONG, **{limit: 5})
    assert made.choices[0].finish_reason == "length"
    assert made.usage is not None
    assert made.usage.completion_tokens == 5
    assert SAID["long_answer"].startswith(made.choices[0].message.content)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_a_bad_request_with_its_code(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": OVERFLOW}], stream=stream)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"


def test_a_wrong_key_a_spent_key_and_an_unknown_model_have_exceptions(base_url: str, key: str, spent_key: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=base_url, api_key="wrong").chat.completions.create(model=MODEL, messages=LONG)
    with pytest.raises(openai.RateLimitError):
        OpenAI(base_url=base_url, api_key=spent_key).chat.completions.create(model=MODEL, messages=LONG)
    with pytest.raises(openai.NotFoundError):
        OpenAI(base_url=base_url, api_key=key).chat.completions.create(model="other", messages=LONG)
    assert [model.id for model in OpenAI(base_url=base_url, api_key=key).models.list()] == [MODEL]
