"""LangChain's chat models and agents, which are graphs of LangGraph: chats and responses of langchain-openai."""

from typing import Any

import openai
import pytest
from check_openai_chat import Train
from conversation import ANSWER, CALLS, MODEL, OVERFLOW, QUESTION, REMARK, SAID, SYSTEM, check_prompt, trains, weather
from langchain.agents import create_agent
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_openai import ChatOpenAI


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def chat(request: pytest.FixtureRequest, base_url: str, key: str) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=base_url, api_key=key, use_responses_api=request.param)


def check_state(messages: list[Any], *, usage: bool = True) -> None:
    spoken = [one for one in messages if isinstance(one, AIMessage)]
    called = [{"name": call["name"], "arguments": call["args"]} for one in spoken for call in one.tool_calls]
    assert called == CALLS
    assert [one.text for one in spoken] == [REMARK, "", ANSWER]
    if usage:
        assert all(one.usage_metadata["output_token_details"]["reasoning"] > 0 for one in spoken[:2])


def test_an_agent_calls_both_tools(chat: ChatOpenAI) -> None:
    agent = create_agent(chat, [weather, trains], system_prompt=SYSTEM)
    state = agent.invoke({"messages": [("user", QUESTION)]})
    check_state(state["messages"])
    check_prompt(thoughts=bool(chat.use_responses_api))


def test_an_agent_streams_what_it_says(chat: ChatOpenAI) -> None:
    agent = create_agent(chat, [weather, trains], system_prompt=SYSTEM)
    texts, messages = "", []
    for kind, part in agent.stream({"messages": [("user", QUESTION)]}, stream_mode=["messages", "values"]):
        if kind == "values":
            messages = part["messages"]
        elif isinstance(part[0], AIMessageChunk):
            texts += part[0].text
    # The package asks only OpenAI's own address for the usage of a stream, and reads summaries of thoughts alone there.
    check_state(messages, usage=bool(chat.use_responses_api))
    assert texts == REMARK + ANSWER
    check_prompt(thoughts=False)


def test_a_stream_adds_up_to_the_call(chat: ChatOpenAI) -> None:
    chunks = [*chat.bind_tools([weather, trains]).stream([("system", SYSTEM), ("user", QUESTION)])]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [{"name": call["name"], "arguments": call["args"]} for call in whole.tool_calls] == CALLS[:1]
    assert whole.text == REMARK
    assert len(chunks) > 1


def test_an_output_is_an_object(chat: ChatOpenAI) -> None:
    made = chat.with_structured_output(Train).invoke(SAID["object_question"])
    assert made.model_dump() == SAID["object"]


def test_a_limit_shows_in_the_metadata(chat: ChatOpenAI) -> None:
    metadata = chat.invoke(SAID["long_question"], max_tokens=5).response_metadata
    assert metadata.get("finish_reason") == "length" or metadata["incomplete_details"]["reason"] == "max_output_tokens"


def test_a_prompt_beyond_the_context_is_langchains_own_error(chat: ChatOpenAI) -> None:
    with pytest.raises(ContextOverflowError):
        chat.invoke(OVERFLOW)
    with pytest.raises(ContextOverflowError):
        [*chat.stream(OVERFLOW)]


def test_a_wrong_key_and_a_spent_key_have_exceptions(base_url: str, spent_key: str) -> None:
    with pytest.raises(openai.AuthenticationError):
        ChatOpenAI(model=MODEL, base_url=base_url, api_key="wrong").invoke(QUESTION)
    with pytest.raises(openai.RateLimitError):
        ChatOpenAI(model=MODEL, base_url=base_url, api_key=spent_key).invoke(QUESTION)
