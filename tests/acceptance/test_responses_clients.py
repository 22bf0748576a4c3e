"""Unmodified clients of the Responses API with a running Quire and the demo model: openai and langchain-openai."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.running_quire import RunningQuire, start_quire

ASK = "What is the weather in Paris?"
MODEL = "demo"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "name": "weather", "description": "Weather of a city.", "parameters": WEATHER}]


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"] = Field(description="Which.")
    wild: bool = Field(description="Whether it is.")


@pytest.fixture(scope="module")
def quire(demo_model: Path) -> Iterator[RunningQuire]:
    one = start_quire("--model", str(demo_model), "--model-name", MODEL, "--http-listen", "127.0.0.1:0")
    yield one
    assert one.close() == 0


@pytest.fixture(scope="module")
def client(quire: RunningQuire) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=f"{quire.http_url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_text_equals_its_stream(client: Any) -> None:
    arguments = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 24, "temperature": 0}
    whole = client.responses.create(**arguments)
    assert whole.output_text
    with client.responses.stream(**arguments) as stream:
        last = list(stream)[-1]
    assert last.type == f"response.{whole.status}"
    assert last.response.output_text == whole.output_text


def test_a_text_is_parsed_into_a_pydantic_class(client: Any) -> None:
    made = client.responses.parse(model=MODEL, input="Describe a pet.", text_format=Pet, max_output_tokens=200)
    assert isinstance(made.output_parsed, Pet)


def test_an_agent_calls_a_tool_and_continues_with_its_output(client: Any) -> None:
    items: list[Any] = [{"role": "user", "content": ASK}]
    named = {"type": "function", "name": "weather"}
    made = client.responses.create(model=MODEL, input=items, tools=TOOLS, tool_choice=named, max_output_tokens=200)
    (call,) = made.output
    assert set(json.loads(call.arguments)) == {"city"}
    items += [*made.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    again = client.responses.create(model=MODEL, input=items, tools=TOOLS, max_output_tokens=50)
    assert {item.type for item in again.output} <= {"message", "function_call"}
    assert again.usage.input_tokens > made.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0


@pytest.fixture(scope="module")
def langchain(quire: RunningQuire) -> Any:
    from langchain_openai import ChatOpenAI  # slow to import

    return ChatOpenAI(
        model=MODEL,
        base_url=f"{quire.http_url}/v1",
        api_key="none",
        max_retries=0,
        max_tokens=200,
        temperature=0,
        use_responses_api=True,
    )


def test_a_langchain_stream_equals_the_response(langchain: Any) -> None:
    whole = langchain.invoke("Say hello.")
    assert whole.text
    assert "".join(chunk.text for chunk in langchain.stream("Say hello.")) == whole.text
    assert whole.usage_metadata["output_tokens"] > 0


def test_langchain_calls_a_tool_and_continues_with_its_output(langchain: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    asked = HumanMessage(ASK)
    called = langchain.bind_tools([Pet], tool_choice="Pet").invoke([asked])
    (call,) = called.tool_calls
    assert isinstance(Pet(**call["args"]), Pet)
    result = ToolMessage("done", tool_call_id=call["id"])
    assert langchain.bind_tools([Pet]).invoke([asked, called, result]).usage_metadata["input_tokens"] > 0


def test_langchain_parses_structured_output(langchain: Any) -> None:
    assert isinstance(langchain.with_structured_output(Pet, method="json_schema").invoke("Describe a pet."), Pet)
