"""Each call of the assistant has one result, in any history that a client sends."""

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import gateway_pb2
from services.gateway.call_results import check_results
from services.runtime.errors import InvalidField

ASK: dict[str, Any] = {"role": "user", "content": "Add."}
BEHIND = "must be followed by tool messages responding to each 'tool_call_id'"
IN_FRONT = "messages with role 'tool' must be a response to a preceding message with 'tool_calls'"


def calling(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": one, "name": "add"} for one in ids]}


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "5"}


def chat(*messages: dict[str, Any], **fields: Any) -> gateway_pb2.Chat:
    return gateway_pb2.Chat(messages=messages, **fields)


@pytest.mark.parametrize(
    ("messages", "field", "words"),
    [
        ([calling("a", "b"), result("a"), ASK], "messages[0].tool_calls[1].id", BEHIND),
        ([ASK, calling("a")], "messages[1].tool_calls[0].id", BEHIND),
        ([calling("a"), calling("a"), result("a")], "messages[0].tool_calls[0].id", BEHIND),
        ([calling("a", "a"), result("a")], "messages[0].tool_calls[1].id", "must differ from"),
        ([calling("a"), result("a"), result("a")], "messages[2].tool_call_id", "Duplicate value for 'tool_call_id'"),
        ([result("a"), calling("a")], "messages[0].tool_call_id", IN_FRONT),
        ([calling("a"), result("a"), ASK, result("a")], "messages[3].tool_call_id", IN_FRONT),
        ([calling("a"), result("b")], "messages[1].tool_call_id", IN_FRONT),
        ([calling("a"), {"role": "tool"}], "messages[1].tool_call_id", "is missing"),
    ],
)
def test_a_history_that_openai_refuses_is_refused_by_its_place_in_its_words(
    messages: list[dict[str, Any]], field: str, words: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        check_results(chat(*messages))
    assert caught.value.field == f"prompt.chat.{field}"
    assert str(caught.value).startswith(f"prompt.chat.{field}")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "messages",
    [
        [calling("a", "b"), result("b"), result("a"), ASK],
        [calling("search:0"), result("search:0"), calling("search:0"), result("search:0")],  # as Kimi writes ids
        [calling("", ""), result("x"), ASK],
        [calling("a"), {"role": "ipython", "content": "5"}, {"role": "tool", "tool_call_id": "a"}],
    ],
)
def test_a_history_that_can_be_matched_is_accepted(messages: list[dict[str, Any]]) -> None:
    check_results(chat(*messages))


def test_the_last_calls_need_no_results_if_no_turn_follows() -> None:
    check_results(chat(ASK, calling("a"), add_generation_prompt=False))
    with pytest.raises(InvalidField):
        check_results(chat(ASK, calling("a"), ASK, add_generation_prompt=False))


_IDS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True)


@given(st.lists(_IDS.flatmap(lambda ids: st.tuples(st.just(ids), st.permutations(ids))), max_size=4), st.data())
def test_without_one_of_its_results_a_complete_history_is_refused(
    turns: list[tuple[list[str], list[str]]], data: st.DataObject
) -> None:
    rounds = [[ASK, calling(*ids), *map(result, answers)] for ids, answers in turns]
    messages = list(chain.from_iterable(rounds))
    check_results(chat(*messages))
    places = [at for at, message in enumerate(messages) if message["role"] == "tool"]
    if places:
        del messages[data.draw(st.sampled_from(places))]
        with pytest.raises(InvalidField, match="has no result"):
            check_results(chat(*messages))
