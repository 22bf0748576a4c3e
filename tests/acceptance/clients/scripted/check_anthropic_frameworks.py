"""Frameworks with their classes for Anthropic's API: langchain-anthropic, pydantic-ai and litellm."""

import json
import os
from typing import Any

import anthropic
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
    trains,
    weather,
)
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage
from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.messages import ModelResponse, ThinkingPart, ToolCallPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads prices

import litellm


@pytest.fixture
def chat(root_url: str, key: str) -> ChatAnthropic:
    return ChatAnthropic(model=MODEL, base_url=root_url, api_key=key)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_langchain_calls_both_tools(chat: ChatAnthropic, stream: bool) -> None:
    agent = create_agent(chat, [weather, trains], system_prompt=SYSTEM)
    asked: Any = {"messages": [("user", QUESTION)]}
    if stream:
        parts = [*agent.stream(asked, stream_mode=["messages", "values"])]
        messages = next(part for kind, part in reversed(parts) if kind == "values")["messages"]
    else:
        messages = agent.invoke(asked)["messages"]
    spoken = [one for one in messages if isinstance(one, AIMessage)]
    called = [{"name": call["name"], "arguments": call["args"]} for one in spoken for call in one.tool_calls]
    assert called == CALLS
    assert [one.text for one in spoken] == [REMARK, "", ANSWER]
    thoughts = [block["thinking"] for one in spoken[:2] for block in one.content if block["type"] == "thinking"]
    assert thoughts == THOUGHTS
    assert all(one.usage_metadata["output_tokens"] > 0 for one in spoken)
    check_prompt(thoughts=True)


def test_a_prompt_beyond_the_context_is_langchains_own_error(chat: ChatAnthropic) -> None:
    with pytest.raises(ContextOverflowError):
        chat.invoke(OVERFLOW)
    with pytest.raises(anthropic.AuthenticationError):
        ChatAnthropic(model=MODEL, base_url=chat.anthropic_api_url, api_key="wrong").invoke(QUESTION)


def test_an_agent_of_pydantic_ai_calls_both_tools(root_url: str, key: str) -> None:
    model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=root_url, api_key=key))
    result = Agent(model, instructions=SYSTEM, tools=[weather, trains]).run_sync(QUESTION)
    assert result.output == ANSWER
    parts = [part for one in result.all_messages() if isinstance(one, ModelResponse) for part in one.parts]
    calls = [part for part in parts if isinstance(part, ToolCallPart)]
    assert [{"name": one.tool_name, "arguments": one.args_as_dict()} for one in calls] == CALLS
    assert [one.content for one in parts if isinstance(one, ThinkingPart)] == THOUGHTS
    check_prompt(thoughts=True)
    with pytest.raises(ModelContextWindowExceededError):
        Agent(model).run_sync(OVERFLOW)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_speaks_to_the_messages_api(root_url: str, key: str, stream: bool) -> None:
    settings: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": root_url, "api_key": key}
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    called = []
    for _ in range(3):
        made = litellm.completion(
            **settings,
            messages=messages,
            tools=[{"type": "function", "function": tool} for tool in TOOLS],
            stream=stream,
        )
        message = (litellm.stream_chunk_builder([*made]) if stream else made).choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            called.append({"name": call.function.name, "arguments": json.loads(call.function.arguments)})
            result = result_of(called[-1]["name"], **called[-1]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert called == CALLS
    assert message.content == ANSWER
    check_prompt(thoughts=True)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**settings, messages=[{"role": "user", "content": OVERFLOW}])
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**settings, "api_key": "wrong"}, messages=[{"role": "user", "content": SAID["question"]}])
