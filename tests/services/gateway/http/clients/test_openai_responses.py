"""OpenAI's client for the Responses API."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import pytest
from pydantic import BaseModel

from tests.running_quire import RunningQuire

if TYPE_CHECKING:
    from openai import OpenAI

MODEL = "tiny-llama"
QUESTION = "Why is the sky blue?"
SUM = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}, "required": ["a"], "additionalProperties": False}
TOOLS = [
    {"type": "function", "name": "sum", "description": "Adds.", "parameters": SUM, "strict": True},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
ASK: dict[str, Any] = {"model": MODEL, "input": QUESTION, "max_output_tokens": 150, "extra_body": {"seed": 4}}


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    wild: bool


@pytest.fixture(scope="module")
def client(tiny_quire: RunningQuire) -> "Iterator[OpenAI]":
    from openai import OpenAI  # slow to import

    with OpenAI(base_url=f"{tiny_quire.http_url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_response_equals_the_chat_with_the_same_messages(client: "OpenAI") -> None:
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}],
        max_completion_tokens=12,
        seed=5,
    )
    made = client.responses.create(
        model=MODEL,
        instructions="Be brief.",
        input=QUESTION,
        max_output_tokens=12,
        metadata={"trial": "1"},
        extra_body={"seed": 5, "request_id": "one"},
    )
    assert made.output_text == chat.choices[0].message.content
    assert (made.usage.input_tokens, made.usage.output_tokens, made.usage.total_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
        chat.usage.total_tokens,
    )
    assert (made.id, made.model, made.metadata, made.store) == ("resp_one", MODEL, {"trial": "1"}, False)
    assert (made.instructions, made.max_output_tokens, made.temperature) == ("Be brief.", 12, 1.0)
    complete = chat.choices[0].finish_reason == "stop"
    assert made.status == ("completed" if complete else "incomplete")
    assert made.incomplete_details is None if complete else made.incomplete_details.reason == "max_output_tokens"
