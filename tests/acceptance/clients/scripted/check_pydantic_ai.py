"""Agents of pydantic-ai: chats and responses."""

import asyncio
from typing import Any

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
    check_prompt,
    trains,
    weather,
)
from pydantic_ai import Agent, ModelHTTPError, NativeOutput
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.messages import ModelResponse, TextPart, ThinkingPart, ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


@pytest.fixture(params=[OpenAIChatModel, OpenAIResponsesModel])
def model(request: pytest.FixtureRequest, base_url: str, key: str) -> Any:
    return request.param(MODEL, provider=OpenAIProvider(base_url=base_url, api_key=key))


def thought_of(part: ThinkingPart) -> str:
    """Return a thought: what is no summary of it has a place of its own in the parts of responses."""
    return part.content or "".join((part.provider_details or {}).get("raw_content", ()))


def check_run(result: Any) -> None:
    assert result.output == ANSWER
    said = [one for one in result.all_messages() if isinstance(one, ModelResponse)]
    parts = [part for one in said for part in one.parts]
    called = [
        {"name": one.tool_name, "arguments": one.args_as_dict()} for one in parts if isinstance(one, ToolCallPart)
    ]
    assert called == CALLS
    assert [thought_of(one) for one in parts if isinstance(one, ThinkingPart)] == THOUGHTS
    assert [one.content for one in parts if isinstance(one, TextPart)] == [REMARK, ANSWER]
    assert [one.finish_reason for one in said][-1] == "stop"
    assert result.usage.requests == 3
    assert result.usage.output_tokens > 0
    check_prompt(thoughts=True)


def test_an_agent_calls_both_tools(model: Any) -> None:
    check_run(Agent(model, instructions=SYSTEM, tools=[weather, trains]).run_sync(QUESTION))


def test_an_agent_streams_its_answer(model: Any) -> None:
    agent = Agent(model, instructions=SYSTEM, tools=[weather, trains])

    async def run() -> Any:
        async with agent.iter(QUESTION) as run:
            async for node in run:
                if Agent.is_model_request_node(node):
                    async with node.stream(run.ctx) as stream:
                        assert len([event async for event in stream]) > 1
        return run.result

    check_run(asyncio.run(run()))


def test_an_output_is_an_object(model: Any) -> None:
    made = Agent(model, output_type=NativeOutput(Train)).run_sync(SAID["object_question"])
    assert made.output.model_dump() == SAID["object"]


def test_a_limit_is_a_finish_reason(model: Any) -> None:
    result = Agent(model, model_settings={"max_tokens": 5}).run_sync(SAID["long_question"])
    assert result.response.finish_reason == "length"


def test_a_prompt_beyond_the_context_is_pydantic_ais_own_error(model: Any) -> None:
    with pytest.raises(ModelContextWindowExceededError) as refused:
        Agent(model).run_sync(OVERFLOW)
    assert refused.value.status_code == 400
    assert refused.value.body["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("wrong", "status"), [("wrong", 401), ("spent", 429)])
def test_a_key_that_is_refused_has_its_status(base_url: str, spent_key: str, wrong: str, status: int) -> None:
    provider = OpenAIProvider(base_url=base_url, api_key=spent_key if wrong == "spent" else wrong)
    with pytest.raises(ModelHTTPError) as refused:
        Agent(OpenAIChatModel(MODEL, provider=provider)).run_sync(QUESTION)
    assert refused.value.status_code == status
