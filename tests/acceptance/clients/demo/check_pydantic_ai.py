"""Agents of pydantic-ai, with functions as tools and with outputs in its default mode, a tool."""

import asyncio
from contextlib import suppress
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_ai import Agent, RunContext, UsageLimits, capture_run_messages
from pydantic_ai.exceptions import UnexpectedModelBehavior, UsageLimitExceeded
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ASK = "Which animal is it?"


class Owner(BaseModel):
    """Who owns it."""

    name: str = Field(max_length=8)


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    wild: bool
    owner: Owner | None = None


@pytest.fixture
def model(base_url: str) -> OpenAIChatModel:
    return OpenAIChatModel("demo", provider=OpenAIProvider(base_url=base_url, api_key="none"))


def settings(**more: Any) -> Any:
    return {"seed": 2, "max_tokens": 160, **more}


def test_an_output_is_an_object(model: OpenAIChatModel) -> None:
    agent = Agent(model, output_type=Animal, model_settings=settings(parallel_tool_calls=False))
    result = agent.run_sync(ASK)
    assert isinstance(result.output, Animal)
    assert result.usage.output_tokens > 0


def test_an_output_is_streamed(model: OpenAIChatModel) -> None:
    async def stream() -> list[Animal]:
        agent = Agent(model, output_type=Animal, model_settings=settings(parallel_tool_calls=False))
        async with agent.run_stream(ASK) as result:
            return [one async for one in result.stream_output(debounce_by=None)]

    outputs = asyncio.run(stream())
    assert isinstance(outputs[-1], Animal)


def test_a_tool_is_called_and_its_result_is_sent_back(model: OpenAIChatModel) -> None:
    seen: list[str] = []

    def first_look(context: RunContext[None]) -> Any:
        return settings(tool_choice=["look"] if not seen else "auto", parallel_tool_calls=False)

    agent = Agent(model, output_type=Animal, model_settings=first_look)

    @agent.tool_plain
    def look(place: Literal["here", "there"]) -> str:
        """Look at the animal."""
        seen.append(place)
        return "It barks."

    with capture_run_messages() as messages, suppress(UsageLimitExceeded, UnexpectedModelBehavior):
        agent.run_sync(ASK, usage_limits=UsageLimits(request_limit=2))
    assert seen[0] in ("here", "there")
    responses = [one for one in messages if isinstance(one, ModelResponse)]
    assert len(responses) == 2
    assert "It barks." in str(messages)


def test_an_agent_with_tools_answers_or_calls(model: OpenAIChatModel) -> None:
    agent = Agent(model, instructions="Be brief.", model_settings=settings(max_tokens=16))

    @agent.tool_plain
    def look(place: str) -> str:
        """Look at the animal."""
        return f"Nothing is at {place}."

    try:
        result = agent.run_sync(ASK, usage_limits=UsageLimits(request_limit=2))
    except UsageLimitExceeded:
        return
    assert isinstance(result.output, str)
