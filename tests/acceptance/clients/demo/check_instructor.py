"""instructor in its default mode, TOOLS, with nested objects, lists and streams."""

from typing import Any, Literal

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

MESSAGES: Any = [{"role": "user", "content": "Describe a family with one child."}]
SETTINGS: dict[str, Any] = {"messages": MESSAGES, "seed": 3, "max_tokens": 200}


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=99)


class Family(BaseModel):
    """A family."""

    home: Literal["house", "boat"]
    parent: Person
    children: list[Person] = Field(min_length=1, max_length=1)


@pytest.fixture
def client(base_url: str) -> Any:
    return instructor.from_openai(OpenAI(base_url=base_url, api_key="none", max_retries=0))


def test_a_response_is_a_nested_object(client: Any) -> None:
    family, completion = client.chat.completions.create_with_completion(
        model="demo", response_model=Family, max_retries=1, **SETTINGS
    )
    assert isinstance(family, Family)
    (call,) = completion.choices[0].message.tool_calls
    assert call.function.name == "Family"


def test_a_provider_makes_the_same_client(base_url: str) -> None:
    client = instructor.from_provider("openai/demo", base_url=base_url, api_key="none")
    assert isinstance(client.create(response_model=Person, max_retries=1, **SETTINGS), Person)


def test_a_stream_gives_partial_objects(client: Any) -> None:
    partials = [*client.chat.completions.create_partial(model="demo", response_model=Family, **SETTINGS)]
    assert len(partials) > 3
    assert partials[0].parent is None or partials[0].parent.age is None
    Family.model_validate(partials[-1].model_dump())


def test_a_stream_gives_the_items_of_a_list(client: Any) -> None:
    arguments = {**SETTINGS, "max_tokens": 60}
    people = [*client.chat.completions.create_iterable(model="demo", response_model=Person, **arguments)]
    assert all(isinstance(one, Person) for one in people)
