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


def test_a_stream_has_the_events_and_the_text_of_the_whole_response(client: "OpenAI") -> None:
    whole = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == events[-1].response.output_text == whole.output_text
    assert len(deltas) > 1
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens
    assert events[0].response.status == "in_progress"


def test_log_probabilities_of_the_text_can_be_included(client: "OpenAI") -> None:
    arguments = {**ASK, "max_output_tokens": 12, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**arguments)
    scores = whole.output[0].content[0].logprobs
    assert len(scores) == whole.usage.output_tokens
    assert {len(score.top_logprobs) for score in scores} == {2}
    streamed = [
        (score.token, score.logprob)
        for event in client.responses.create(**arguments, stream=True)
        if event.type == "response.output_text.delta"
        for score in event.logprobs
    ]
    assert streamed == [(score.token, score.logprob) for score in scores]


def test_a_response_is_parsed_into_a_pydantic_class(client: "OpenAI") -> None:
    made = client.responses.parse(**{**ASK, "max_output_tokens": 400}, text_format=Pet)
    assert isinstance(made.output_parsed, Pet)
    with client.responses.stream(**{**ASK, "max_output_tokens": 400}, text_format=Pet) as stream:
        assert stream.get_final_response().output_parsed == made.output_parsed


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "sum"}], ids=["required", "named"])
def test_a_forced_call_is_made_and_its_output_starts_a_second_round(client: "OpenAI", choice: Any) -> None:
    arguments = {**ASK, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    made = client.responses.create(**arguments)
    (call,) = made.output
    assert (call.type, call.status) == ("function_call", "completed")
    assert (call.name, json.loads(call.arguments)) in [("now", {}), *(("sum", {"a": digit}) for digit in (1, 2, 3))]
    assert choice == "required" or call.name == "sum"
    with client.responses.stream(**arguments) as stream:
        final = stream.get_final_response()
    assert (final.output[0].name, final.output[0].arguments) == (call.name, call.arguments)
    items = [{"role": "user", "content": QUESTION}, *made.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
    again = client.responses.create(**{**ASK, "input": items, "max_output_tokens": 5}, tools=TOOLS)
    assert again.usage.input_tokens > made.usage.input_tokens
    assert again.output


def test_a_model_may_answer_or_call_if_it_chooses(client: "OpenAI") -> None:
    made = client.responses.create(**ASK, tools=TOOLS, tool_choice="auto")
    assert {item.type for item in made.output} <= {"message", "function_call"}
    with client.responses.stream(**ASK, tools=TOOLS, tool_choice="auto") as stream:
        last = list(stream)[-1]
    assert [item.type for item in last.response.output] == [item.type for item in made.output]
    assert last.response.output_text == made.output_text


def test_errors_raise_the_exceptions_of_the_client(client: "OpenAI") -> None:
    import openai

    for arguments, param in (
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "teleport"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"include": ["everything"]}, "include[0]"),
        ({"temperature": -1}, "temperature"),
    ):
        with pytest.raises(openai.BadRequestError) as wrong:
            client.responses.create(**{**ASK, **arguments})
        assert wrong.value.param == param
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="does not store responses") as missing:
            call("resp_1")
        assert missing.value.code == "not_served"
