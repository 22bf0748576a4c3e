"""Unmodified langchain-openai and litellm with a running Quire. Their imports take seconds."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from pydantic import BaseModel, Field

from tests.running_quire import CALL_SECONDS, RunningQuire, start_quire

ASK = "Why is the sky blue?"


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"] = Field(description="Which.")
    wild: bool = Field(description="Whether it is.")


@pytest.fixture(scope="module")
def quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    one = start_quire("--model", str(tiny_model("llama")), "--device-blocks", "64", "--http-listen", "127.0.0.1:0")
    yield one
    assert one.close() == 0


# langchain-openai


@pytest.fixture(scope="module")
def langchain(quire: RunningQuire) -> Iterator[dict[str, Any]]:
    """Arguments for langchain's classes."""
    with httpx.Client(timeout=CALL_SECONDS) as client:
        # A random model generates long runs of whitespace where JSON allows them.
        blanks = client.post(f"{quire.http_url}/tokenize", json={"prompt": "\t\n\r "}).json()["tokens"]
        yield {
            "logit_bias": {str(token): -100 for token in blanks},
            "model": "tiny-llama",
            "base_url": f"{quire.http_url}/v1",
            "api_key": "none",
            "max_retries": 0,
            "seed": 3,
            "http_client": client,
        }


@pytest.fixture(scope="module")
def chat(langchain: dict[str, Any]) -> Any:
    from langchain_openai import ChatOpenAI  # slow to import

    return ChatOpenAI(**langchain, max_tokens=400)


def test_a_langchain_stream_equals_the_response(chat: Any) -> None:
    whole = chat.invoke(ASK)
    assert "".join(chunk.content for chunk in chat.stream(ASK)) == whole.content
    assert whole.usage_metadata["output_tokens"] > 0


def test_langchain_returns_log_probabilities_and_stops(chat: Any) -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(ASK, max_tokens=4)
    assert len(answer.response_metadata["logprobs"]["content"]) == 4
    text = chat.invoke(ASK).content
    assert chat.invoke(ASK, stop=[text[4]]).content == text[: text.index(text[4])]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_parses_structured_output(chat: Any, method: str) -> None:
    assert isinstance(chat.with_structured_output(Pet, method=method).invoke(ASK), Pet)


def test_langchain_calls_tools(chat: Any) -> None:
    answer = chat.bind_tools([Pet], tool_choice="any").invoke(ASK)
    assert answer.tool_calls
    assert {call["name"] for call in answer.tool_calls} == {"Pet"}


def test_langchain_completes_texts(langchain: dict[str, Any]) -> None:
    from langchain_openai import OpenAI

    llm = OpenAI(**langchain, max_tokens=8)
    assert "".join(llm.stream(ASK)) == llm.invoke(ASK)
    assert len(llm.batch([ASK, "Once"])) == 2


# litellm


@pytest.fixture(scope="module")
def litellm() -> Iterator[Any]:
    before = dict(os.environ)
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm downloads it
    import litellm  # slow to import

    # It loads the .env of this folder, whose variables are those of docker compose, for all later tests.
    os.environ.clear()
    os.environ.update(before)

    with httpx.Client(timeout=CALL_SECONDS) as client, asyncio.Runner() as runner:
        # litellm would create an event loop for the thread and never close it, which fails a later test.
        asyncio.set_event_loop(runner.get_loop())
        litellm.client_session = client
        yield litellm
        asyncio.set_event_loop(None)
    litellm.module_level_client.close()


def test_a_litellm_stream_equals_the_response(quire: RunningQuire, litellm: Any) -> None:
    arguments = {
        "model": "openai/tiny-llama",
        "api_base": f"{quire.http_url}/v1",
        "api_key": "none",
        "messages": [{"role": "user", "content": ASK}],
        "max_tokens": 12,
        "seed": 3,
    }
    whole = litellm.completion(**arguments)
    streamed = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**arguments, stream=True)]
    assert "".join(streamed) == whole.choices[0].message.content
    several = litellm.completion(**arguments, n=2, logprobs=True, top_logprobs=1, stop=["~~~"])
    assert len(several.choices) == 2
    structured = litellm.completion(**{**arguments, "max_tokens": 120}, response_format=Pet)
    Pet.model_validate_json(structured.choices[0].message.content)
    text = litellm.text_completion(
        model="text-completion-openai/tiny-llama",
        prompt=ASK,
        api_base=f"{quire.http_url}/v1",
        api_key="none",
        max_tokens=8,
        temperature=0,
    )
    assert text.choices[0].text


def test_litellm_sends_fields_of_vllm(quire: RunningQuire, litellm: Any) -> None:
    answer = litellm.completion(
        model="hosted_vllm/tiny-llama",
        api_base=f"{quire.http_url}/v1",
        messages=[{"role": "user", "content": ASK}],
        max_tokens=8,
        top_k=1,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage.completion_tokens == 8
