import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
from pydantic import BaseModel

from tests.load import prompt_request
from tests.running_quire import RunningQuire

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat.chat_completion import ChoiceLogprobs

PROMPT = "The quick brown fox"
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    wild: bool


@pytest.fixture(scope="module")
def client(tiny_quire: RunningQuire) -> "Iterator[OpenAI]":
    from openai import OpenAI  # slow to import

    with OpenAI(base_url=f"{tiny_quire.http_url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_completions_with_a_seed_equal_those_of_grpc(tiny_quire: RunningQuire, client: "OpenAI") -> None:
    own = tiny_quire.generate(prompt_request(PROMPT, 12, seed=5, ignore_eos=False))
    made = client.completions.create(model="tiny-llama", prompt=PROMPT, max_tokens=12, seed=5)
    assert made.choices[0].text == own.text
    assert made.usage.completion_tokens == own.finished.usage.generated_tokens
    stream = client.completions.create(model="tiny-llama", prompt=PROMPT, max_tokens=12, seed=5, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == own.text


def test_a_chat_and_its_stream(client: "OpenAI") -> None:
    arguments = {"model": "tiny-llama", "messages": MESSAGES, "max_completion_tokens": 12, "seed": 5, "n": 2}
    made = client.chat.completions.create(**arguments)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage
    assert texts == [choice.message.content for choice in made.choices]
    assert usage.total_tokens == made.usage.total_tokens


def summary(logprobs: "ChoiceLogprobs | None") -> list[tuple[list[int], float, int]]:
    """Return bytes, log-probability and number of candidates of each token."""
    content = logprobs.content if logprobs else []
    return [(one.bytes, round(one.logprob, 2), len(one.top_logprobs)) for one in content]


@pytest.mark.parametrize("stop", [None, "e"])
def test_streams_of_two_choices_have_each_log_probability_once(client: "OpenAI", stop: str | None) -> None:
    common = {"model": "tiny-llama", "max_tokens": 12, "seed": 5, "n": 2, "stop": stop}
    counted = {"stream": True, "stream_options": {"include_usage": True}}
    chat = {**common, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    made = client.chat.completions.create(**chat)
    scores: list[list[tuple[list[int], float, int]]] = [[], []]
    *chunks, last = client.chat.completions.create(**chat, **counted)
    for chunk in chunks:
        assert chunk.usage is None
        for choice in chunk.choices:
            scores[choice.index] += summary(choice.logprobs)
    assert scores == [summary(choice.logprobs) for choice in made.choices]
    assert (last.choices, last.usage) == ([], made.usage)
    assert last.usage.completion_tokens == sum(map(len, scores))
    completion = {**common, "prompt": PROMPT, "logprobs": 3, "echo": True}
    answer = client.completions.create(**completion)
    texts, tokens, offsets = ["", ""], [[], []], [[], []]
    *parts, last_part = client.completions.create(**completion, **counted)
    for part in parts:
        assert part.usage is None
        for one in part.choices:
            texts[one.index] += one.text
            tokens[one.index] += one.logprobs.tokens if one.logprobs else []
            offsets[one.index] += one.logprobs.text_offset if one.logprobs else []
    assert texts == [one.text for one in answer.choices]
    assert tokens == [one.logprobs.tokens for one in answer.choices]
    assert offsets == [one.logprobs.text_offset for one in answer.choices]
    assert (last_part.choices, last_part.usage.completion_tokens) == ([], answer.usage.completion_tokens)


def test_responses_are_parsed_into_a_pydantic_class(client: "OpenAI") -> None:
    made = client.chat.completions.parse(
        model="tiny-llama", messages=MESSAGES, max_tokens=400, seed=0, response_format=Pet
    )
    assert isinstance(made.choices[0].message.parsed, Pet)


def test_tools_are_called(client: "OpenAI") -> None:
    from openai import pydantic_function_tool

    tools = [pydantic_function_tool(Pet, name="buy")]
    arguments = {"model": "tiny-llama", "messages": MESSAGES, "max_tokens": 400, "tools": tools, "seed": 1}
    named = {"type": "function", "function": {"name": "buy"}}
    made = client.chat.completions.parse(**arguments, tool_choice=named)
    (call,) = made.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Pet)
    with client.chat.completions.stream(**arguments, tool_choice=named) as stream:
        stream.until_done()
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert (final.function.name, final.function.arguments) == ("buy", call.function.arguments)
    answered = [*MESSAGES, made.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "done"}]
    again = client.chat.completions.create(model="tiny-llama", messages=answered, tools=tools, max_tokens=5)
    assert again.usage.prompt_tokens > made.usage.prompt_tokens


def test_errors_raise_the_exceptions_of_the_client(client: "OpenAI") -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.completions.create(model="tiny-llama", prompt=PROMPT, temperature=-1)
    assert wrong.value.param == "temperature"


def test_the_example_of_the_readme_prints_an_answer(
    tiny_quire: RunningQuire, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (Path(__file__).parents[5] / "README.md").read_text()
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "openai" in one]
    # With a seed, because a sampled answer can be empty.
    for old, new in (
        ("http://127.0.0.1:8000", tiny_quire.http_url),
        ("max_completion_tokens=64", "max_completion_tokens=64, seed=3"),
    ):
        assert old in code
        code = code.replace(old, new)
    exec(code, {})
    assert capsys.readouterr().out.strip()
