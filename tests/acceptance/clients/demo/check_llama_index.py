"""LlamaIndex with the demo model: an object by a forced call, a text and its stream."""

from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Animal(BaseModel):
    """Name the animal."""

    kind: Literal["cat", "dog"]
    wild: bool


@pytest.fixture
def model(base_url: str) -> OpenAILike:
    settings: Any = {"is_chat_model": True, "is_function_calling_model": True, "max_tokens": 80, "temperature": 0}
    return OpenAILike(model="demo", api_base=base_url, api_key="none", max_retries=0, **settings)


def test_an_object_is_predicted(model: OpenAILike) -> None:
    assert isinstance(model.structured_predict(Animal, PromptTemplate("Which animal is it?")), Animal)


def test_a_stream_has_the_text_of_the_whole_answer(model: OpenAILike) -> None:
    asked = [ChatMessage(role=MessageRole.USER, content="Why is the sky blue?")]
    whole = model.chat(asked, max_tokens=8).message.content
    assert whole
    assert "".join(one.delta or "" for one in model.stream_chat(asked, max_tokens=8)) == whole
