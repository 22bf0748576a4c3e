"""Agents, tools and structured outputs of LangChain."""

from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from pydantic import BaseModel

ASK = "Which animal is it?"


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    wild: bool


@tool
def look(place: Literal["here", "there"]) -> str:
    """Look at the animal."""
    return "It barks."


@pytest.fixture
def chat(base_url: str) -> ChatOpenAI:
    arguments: dict[str, Any] = {"base_url": base_url, "api_key": "none", "max_retries": 0, "seed": 3}
    return ChatOpenAI(model="demo", max_tokens=120, **arguments)


def test_a_bound_tool_is_called_and_its_result_is_sent_back(chat: ChatOpenAI) -> None:
    calling = chat.bind_tools([look], tool_choice="look").invoke(ASK)
    (call,) = calling.tool_calls
    assert call["args"]["place"] in ("here", "there")
    result = look.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = chat.bind_tools([look]).invoke([("user", ASK), calling, result], max_tokens=12)
    assert answer.content or answer.tool_calls or answer.response_metadata["finish_reason"] == "length"


def test_a_stream_adds_up_to_the_call(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([look], tool_choice="any", parallel_tool_calls=False)
    chunks = [*bound.stream(ASK)]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (call,) = whole.tool_calls
    assert call["name"] == "look"
    assert call["args"]["place"] in ("here", "there")


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_an_output_is_an_object(chat: ChatOpenAI, method: Any) -> None:
    assert isinstance(chat.with_structured_output(Animal, method=method).invoke(ASK), Animal)


def test_an_agent_answers_or_calls(chat: ChatOpenAI) -> None:
    agent = create_agent(chat, [look], system_prompt="Be brief.")
    try:
        state = agent.invoke({"messages": [("user", ASK)]}, {"recursion_limit": 5})
    except GraphRecursionError:
        return
    assert isinstance(state["messages"][-1], AIMessage)


def test_an_agent_gives_an_object(base_url: str) -> None:
    # A small model makes one call after the other if it may.
    chat = ChatOpenAI(
        model="demo", max_tokens=120, base_url=base_url, api_key="none", model_kwargs={"parallel_tool_calls": False}
    )
    agent = create_agent(chat, [], response_format=ToolStrategy(Animal))
    state = agent.invoke({"messages": [("user", ASK)]}, {"recursion_limit": 5})
    assert isinstance(state["structured_response"], Animal)
