"""litellm: its chats, its responses, its route for Anthropic's clients, and its exceptions."""

import asyncio
import json
import os
from typing import Any

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

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads prices

import litellm

FUNCTIONS: Any = [{"type": "function", "function": tool} for tool in TOOLS]
START: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def settings(request: pytest.FixtureRequest, base_url: str, key: str) -> dict[str, Any]:
    return {"model": f"{request.param}/{MODEL}", "api_base": base_url, "api_key": key}


def whole(settings: dict[str, Any], messages: list[Any]) -> Any:
    return litellm.completion(**settings, messages=messages, tools=FUNCTIONS)


def streamed(settings: dict[str, Any], messages: list[Any]) -> Any:
    chunks = [*litellm.completion(**settings, messages=messages, tools=FUNCTIONS, stream=True)]
    assert len(chunks) > 1
    return litellm.stream_chunk_builder(chunks, messages=messages)


@pytest.mark.parametrize("answer", [whole, streamed])
def test_three_turns_call_both_tools(settings: dict[str, Any], answer: Any) -> None:
    messages, called, reasons, texts, thoughts = [*START], [], [], [], []
    for _ in range(3):
        (choice,) = answer(settings, messages).choices
        reasons.append(choice.finish_reason)
        texts.append(choice.message.content or None)
        thoughts.append(getattr(choice.message, "reasoning_content", None))
        messages.append(choice.message)
        for call in choice.message.tool_calls or ():
            made = {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
            called.append(made)
            result = result_of(made["name"], **made["arguments"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert called == CALLS
    assert reasons == ["tool_calls", "tool_calls", "stop"]
    assert texts == [REMARK, None, ANSWER]
    assert thoughts == [*THOUGHTS, None]
    check_prompt(thoughts=True)


def test_usage_has_its_details(settings: dict[str, Any]) -> None:
    usage = whole(settings, START).usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.completion_tokens_details.reasoning_tokens > 0


def response_whole(settings: dict[str, Any], items: list[Any]) -> Any:
    return litellm.responses(**settings, instructions=SYSTEM, input=items, tools=_response_tools())


def response_streamed(settings: dict[str, Any], items: list[Any]) -> Any:
    stream = litellm.responses(**settings, instructions=SYSTEM, input=items, tools=_response_tools(), stream=True)
    events = [*stream]
    assert len(events) > 1
    return events[-1].response


def _response_tools() -> list[Any]:
    return [{"type": "function", **tool} for tool in TOOLS]


@pytest.mark.parametrize("answer", [response_whole, response_streamed])
def test_three_turns_of_responses_call_both_tools(settings: dict[str, Any], answer: Any) -> None:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    called: list[Any] = []
    for _ in range(3):
        response = answer(settings, items)
        for item in response.output:
            plain = item if isinstance(item, dict) else item.model_dump(exclude_none=True)
            items.append(plain)
            if plain["type"] == "function_call":
                called.append({"name": plain["name"], "arguments": json.loads(plain["arguments"])})
                result = result_of(called[-1]["name"], **called[-1]["arguments"])
                items.append({"type": "function_call_output", "call_id": plain["call_id"], "output": result})
    assert called == CALLS
    assert response.output_text == ANSWER
    assert response.usage.output_tokens > 0
    check_prompt(thoughts=True)


class AnthropicRoute:
    """Messages of Anthropic's form, which litellm sends to any server."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._tools = [
            {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
            for tool in TOOLS
        ]

    def whole(self, messages: list[Any]) -> dict[str, Any]:
        return dict(asyncio.run(self._create(messages)))

    def streamed(self, messages: list[Any]) -> dict[str, Any]:
        return asyncio.run(self._collect(messages))

    async def _create(self, messages: list[Any], **arguments: Any) -> Any:
        return await litellm.anthropic.messages.acreate(
            **self._settings, messages=messages, system=SYSTEM, tools=self._tools, max_tokens=300, **arguments
        )

    async def _collect(self, messages: list[Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"content": []}
        arguments: dict[int, str] = {}
        async for part in await self._create(messages, stream=True):
            for event in _events(part):
                if event["type"] == "content_block_start":
                    message["content"].append(dict(event["content_block"]))
                elif event["type"] == "content_block_delta":
                    _add(message["content"][event["index"]], event["delta"], arguments, event["index"])
                elif event["type"] == "message_delta":
                    message["stop_reason"] = event["delta"]["stop_reason"]
                    message["usage"] = event["usage"]
        for at, text in arguments.items():
            message["content"][at]["input"] = json.loads(text or "{}")
        return message


def _events(part: Any) -> list[dict[str, Any]]:
    if isinstance(part, dict):
        return [part]
    lines = part.decode().splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def _add(block: dict[str, Any], delta: dict[str, Any], arguments: dict[int, str], at: int) -> None:
    if delta["type"] == "input_json_delta":
        arguments[at] = arguments.get(at, "") + delta["partial_json"]
    elif delta["type"] in ("text_delta", "thinking_delta"):
        name = delta["type"].removesuffix("_delta")
        block[name] = block.get(name, "") + delta[name]


@pytest.mark.parametrize("kind", ["whole", "streamed"])
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_three_turns_of_the_anthropic_route_call_both_tools(base_url: str, key: str, kind: str, provider: str) -> None:
    route = AnthropicRoute({"model": f"{provider}/{MODEL}", "api_base": base_url, "api_key": key})
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    called, reasons, texts = [], [], []
    for _ in range(3):
        message = getattr(route, kind)(messages)
        reasons.append(message["stop_reason"])
        messages.append({"role": "assistant", "content": message["content"]})
        blocks = [dict(block) for block in message["content"]]
        texts += [block["text"] for block in blocks if block["type"] == "text" and block["text"]]
        calls = [block for block in blocks if block["type"] == "tool_use"]
        called += [{"name": block["name"], "arguments": block["input"]} for block in calls]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": result_of(block["name"], **block["input"])}
            for block in calls
        ]
        if results:
            messages.append({"role": "user", "content": results})
    assert called == CALLS
    assert reasons == ["tool_use", "tool_use", "end_turn"]
    assert texts == [REMARK, ANSWER]


def test_an_output_follows_a_schema(settings: dict[str, Any]) -> None:
    from check_openai_chat import Train

    made = litellm.completion(
        **settings, messages=[{"role": "user", "content": SAID["object_question"]}], response_format=Train
    )
    assert json.loads(made.choices[0].message.content) == SAID["object"]


def test_a_limit_ends_the_text_with_length(settings: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": SAID["long_question"]}]
    assert litellm.completion(**settings, messages=messages, max_tokens=5).choices[0].finish_reason == "length"


def test_a_prompt_beyond_the_context_is_litellms_own_exception(settings: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": OVERFLOW}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**settings, messages=messages)
    with pytest.raises(litellm.ContextWindowExceededError):
        [*litellm.completion(**settings, messages=messages, stream=True)]


def test_a_wrong_key_and_a_spent_key_have_exceptions(settings: dict[str, Any], spent_key: str) -> None:
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**settings, "api_key": "wrong"}, messages=START)
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(**{**settings, "api_key": spent_key}, messages=START)
