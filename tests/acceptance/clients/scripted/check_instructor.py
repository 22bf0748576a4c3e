"""instructor: objects by a forced call, its default, and by a JSON schema; whole, in parts, and as lists."""

from typing import Any

import instructor
import openai
import pytest
from conversation import MODEL, OVERFLOW, SAID
from instructor.core.exceptions import IncompleteOutputException, InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel


class Stop(BaseModel):
    city: str


class Train(BaseModel):
    number: int
    stops: list[Stop]
    night: bool


CALLED: Any = [{"role": "user", "content": SAID["called_object_question"]}]
PARTIAL: Any = [{"role": "user", "content": SAID["partial_question"]}]
WRITTEN: Any = [{"role": "user", "content": SAID["object_question"]}]
LISTED: Any = [{"role": "user", "content": SAID["list_question"]}]


@pytest.fixture
def client(base_url: str, key: str) -> Any:
    return instructor.from_openai(OpenAI(base_url=base_url, api_key=key))


def test_a_response_is_an_object(client: Any) -> None:
    train, completion = client.chat.completions.create_with_completion(
        model=MODEL, response_model=Train, messages=CALLED
    )
    assert train.model_dump() == SAID["object"]
    assert completion.choices[0].finish_reason in ("tool_calls", "stop")
    assert completion.usage.total_tokens > 0


def test_a_provider_makes_the_same_client(base_url: str, key: str) -> None:
    client = instructor.from_provider(f"openai/{MODEL}", base_url=base_url, api_key=key)
    assert client.create(response_model=Train, messages=CALLED).model_dump() == SAID["object"]


def test_a_schema_gives_the_same_object(base_url: str, key: str) -> None:
    client = instructor.from_openai(OpenAI(base_url=base_url, api_key=key), mode=instructor.Mode.JSON_SCHEMA)
    made = client.chat.completions.create(model=MODEL, response_model=Train, messages=WRITTEN)
    assert made.model_dump() == SAID["object"]


def test_a_stream_gives_partial_objects(client: Any) -> None:
    partials = [*client.chat.completions.create_partial(model=MODEL, response_model=Train, messages=PARTIAL)]
    assert len(partials) > 1
    assert partials[-1].model_dump() == SAID["object"]


def test_a_stream_gives_the_items_of_a_list(client: Any) -> None:
    stops = [*client.chat.completions.create_iterable(model=MODEL, response_model=Stop, messages=LISTED)]
    assert [stop.model_dump() for stop in stops] == SAID["object"]["stops"]


def test_two_tools_are_called_side_by_side(base_url: str, key: str) -> None:
    class Weather(BaseModel):
        city: str

    class Trains(BaseModel):
        origin: str
        destination: str
        passengers: int

    from collections.abc import Iterable

    client = instructor.from_openai(OpenAI(base_url=base_url, api_key=key), mode=instructor.Mode.PARALLEL_TOOLS)
    asked: Any = [{"role": "user", "content": SAID["parallel_question"]}]
    made = client.chat.completions.create(model=MODEL, response_model=Iterable[Weather | Trains], messages=asked)
    assert [(type(one).__name__, one.model_dump()) for one in made] == [
        ("Trains", SAID["calls"][1]["arguments"]),
        ("Weather", SAID["calls"][2]["arguments"]),
    ]


def test_a_cut_output_is_reported(client: Any) -> None:
    with pytest.raises((IncompleteOutputException, InstructorRetryException)) as cut:
        client.chat.completions.create(model=MODEL, response_model=Train, messages=CALLED, max_tokens=30, max_retries=0)
    assert "incomplete" in str(cut.value)


def test_refusals_have_the_exceptions_of_openai(client: Any, base_url: str) -> None:
    for one, messages, error in (
        (client, [{"role": "user", "content": OVERFLOW}], openai.BadRequestError),
        (instructor.from_openai(OpenAI(base_url=base_url, api_key="wrong")), CALLED, openai.AuthenticationError),
    ):
        with pytest.raises((InstructorRetryException, error)) as refused:
            one.chat.completions.create(model=MODEL, response_model=Train, messages=messages)
        cause: Any = cause_of(refused.value, error)
        assert isinstance(cause, error)
        if error is openai.BadRequestError:
            assert cause.code == "context_length_exceeded"


def cause_of(raised: BaseException, kind: type[BaseException]) -> BaseException | None:
    """Return the exception of this kind behind another."""
    cause: BaseException | None = raised
    while cause is not None and not isinstance(cause, kind):
        cause = cause.__cause__
    return cause
