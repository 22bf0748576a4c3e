"""The OpenAI Agents SDK: chats and responses."""

import asyncio
import json
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    AsyncOpenAI,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
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

set_tracing_disabled(True)


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
def model_class(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def agent(model_class: Any, base_url: str, key: str) -> Any:
    model = model_class(model=MODEL, openai_client=AsyncOpenAI(base_url=base_url, api_key=key))
    return Agent(
        name="planner", instructions=SYSTEM, tools=[function_tool(weather), function_tool(trains)], model=model
    )


def check_result(result: Any, *, usage: bool = True) -> None:
    assert result.final_output == ANSWER
    calls = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls] == CALLS
    texts = [
        part.text for item in result.new_items if item.type == "message_output_item" for part in item.raw_item.content
    ]
    assert texts == [REMARK, ANSWER]
    thoughts = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    assert [(one.summary or one.content)[0].text for one in thoughts] == THOUGHTS
    used = result.context_wrapper.usage
    assert used.requests == 3
    assert (used.total_tokens == used.input_tokens + used.output_tokens > 0) == usage


def test_an_agent_calls_both_tools(agent: Any, model_class: Any) -> None:
    check_result(asyncio.run(Runner.run(agent, QUESTION)))
    check_prompt(thoughts=model_class is OpenAIResponsesModel)


def test_an_agent_streams_what_it_says(agent: Any, model_class: Any) -> None:
    async def run() -> tuple[Any, str]:
        result, text = Runner.run_streamed(agent, QUESTION), ""
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return result, text

    result, text = asyncio.run(run())
    # Streams of chats have usage only if the settings of the model ask for it.
    check_result(result, usage=model_class is OpenAIResponsesModel)
    assert text == REMARK + ANSWER
    check_prompt(thoughts=model_class is OpenAIResponsesModel)


def test_an_output_is_an_object(agent: Any) -> None:
    typed = agent.clone(output_type=Train, tools=[])
    assert asyncio.run(Runner.run(typed, SAID["object_question"])).final_output.model_dump() == SAID["object"]


def test_a_prompt_beyond_the_context_is_a_bad_request_with_its_code(agent: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        asyncio.run(Runner.run(agent, OVERFLOW))
    assert refused.value.code == "context_length_exceeded"


def test_a_wrong_key_and_a_spent_key_have_exceptions(model_class: Any, base_url: str, spent_key: str) -> None:
    for key, error in (("wrong", openai.AuthenticationError), (spent_key, openai.RateLimitError)):
        model = model_class(model=MODEL, openai_client=AsyncOpenAI(base_url=base_url, api_key=key))
        with pytest.raises(error):
            asyncio.run(Runner.run(Agent(name="planner", model=model), QUESTION))
