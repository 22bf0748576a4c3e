"""LlamaIndex with its class for servers like OpenAI's: agents, streams and objects."""

import asyncio
from typing import Any

import openai
import pytest
from conversation import ANSWER, CALLS, MODEL, OVERFLOW, QUESTION, REMARK, SAID, SYSTEM, check_prompt, trains, weather
from llama_index.core.agent.workflow import AgentStream, FunctionAgent, ToolCallResult
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.llms import MessageRole
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Stop(BaseModel):
    """A stop."""

    city: str


class Train(BaseModel):
    """A train."""

    number: int
    stops: list[Stop]
    night: bool


def model(base_url: str, key: str, **arguments: Any) -> OpenAILike:
    settings: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True, **arguments}
    return OpenAILike(model=MODEL, api_base=base_url, api_key=key, **settings)


@pytest.mark.parametrize("streaming", [True, False])
def test_an_agent_calls_both_tools(base_url: str, key: str, streaming: bool) -> None:
    agent = FunctionAgent(llm=model(base_url, key), tools=[weather, trains], system_prompt=SYSTEM, streaming=streaming)

    async def run() -> tuple[Any, list[Any]]:
        handler = agent.run(QUESTION)
        events = [event async for event in handler.stream_events()]
        return await handler, events

    result, events = asyncio.run(run())
    assert str(result) == ANSWER
    called = [
        {"name": one.tool_name, "arguments": one.tool_kwargs} for one in events if isinstance(one, ToolCallResult)
    ]
    assert sorted(map(str, called)) == sorted(map(str, CALLS))
    if streaming:
        assert "".join(one.delta for one in events if isinstance(one, AgentStream)) == REMARK + ANSWER
    check_prompt()


def test_a_chat_has_the_answer_and_the_usage(base_url: str, key: str) -> None:
    asked = [ChatMessage(role=MessageRole.USER, content=SAID["long_question"])]
    response = model(base_url, key).chat(asked)
    assert response.message.content == SAID["long_answer"]
    assert response.raw.usage.completion_tokens > 0
    assert "".join(one.delta for one in model(base_url, key).stream_chat(asked)) == SAID["long_answer"]


def test_an_output_is_an_object(base_url: str, key: str) -> None:
    called = model(base_url, key).as_structured_llm(Train).complete(SAID["called_object_question"]).raw
    assert called.model_dump() == SAID["object"]
    written = model(base_url, key, should_use_structured_outputs=True)
    assert written.as_structured_llm(Train).complete(SAID["object_question"]).raw.model_dump() == SAID["object"]


def test_refusals_have_the_exceptions_of_openai(base_url: str, key: str, spent_key: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        model(base_url, key).complete(OVERFLOW)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        model(base_url, "wrong").complete(QUESTION)
    with pytest.raises(openai.RateLimitError):
        model(base_url, spent_key, max_retries=0).complete(QUESTION)  # it would try for two minutes
