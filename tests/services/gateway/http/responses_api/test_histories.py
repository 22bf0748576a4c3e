"""Calls and outputs in the input of /v1/responses."""

from typing import Any

import pytest

from tests.services.gateway.http.responses import rejection
from tests.services.gateway.http.responses_api.playing import SAID, Item, Player


def called(call_id: str, **fields: Any) -> Item:
    return {"type": "function_call", "call_id": call_id, "name": "sum", "arguments": "{}", **fields}


def returned(call_id: str, **fields: Any) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": "2", **fields}


@pytest.mark.parametrize(
    ("items", "param", "message"),
    [
        ([called("a")], "input", "No tool output found for function call a. It is input[1], "),
        ([called("a"), called("b"), returned("a"), SAID], "input", "No tool output found for function call b."),
        ([called("a"), returned("a"), called("a")], "input", "No tool output found for function call a."),
        ([{**called("a"), "type": "custom_tool_call", "input": "x", "arguments": None}], "input", "function call a."),
        ([returned("a"), called("a")], "input[1].call_id", "must be that of an earlier call"),
        ([called("a"), returned("b")], "input[2].call_id", "must be that of an earlier call"),
        ([called("a"), called("a"), returned("a")], "input[2].call_id", "is that of input[1], which has no output"),
        ([called("a"), returned("a"), returned("a")], "input[3].call_id", "without an output: input[2] is one"),
        (
            [called("a", id="fc_x"), returned("a"), called("b", id="fc_x"), returned("b")],
            "input[3].id",
            "Duplicate item found with id fc_x. Remove duplicate items from your input and try again",
        ),
        ([{"type": "local_shell_call", "action": {}}], "input[1].call_id", "input[1].call_id is missing"),
        ([called(""), returned("")], "input[1].call_id", "must be a string of at least 1 characters"),
    ],
)
def test_a_call_has_one_output_behind_it(player: Player, items: list[Item], param: str, message: str) -> None:
    answer = player.post(input=[SAID, *items])
    assert rejection(answer) == (400, "invalid_value")
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert not player.server.handler.requests


def test_models_may_number_their_calls_anew_in_each_turn(player: Player) -> None:
    turn = [called("search:0"), called("search:1"), returned("search:0"), returned("search:1")]
    player.play("Hi")
    player.respond(input=[SAID, *turn, SAID, *turn])
    messages = player.request.prompt.chat.messages
    assert [[call.id for call in one.tool_calls] for one in messages if one.tool_calls] == [
        ["search:0", "search:1"]
    ] * 2


def test_an_output_may_follow_other_items(player: Player) -> None:
    player.play("Hi")
    player.respond(input=[SAID, called("a", id=""), called("b", id=""), returned("b"), returned("a")])
    assert [message.tool_call_id for message in player.request.prompt.chat.messages[2:]] == ["b", "a"]


def test_text_behind_calls_belongs_to_their_message(player: Player) -> None:
    before = {"role": "assistant", "content": "I add."}
    behind = {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}]}
    player.play("Hi")
    for items, content in (([before, behind], ["I add.", "Wait."]), ([behind], ["Wait."])):
        turn = [*items[:-1], called("a"), called("b"), items[-1], returned("a"), returned("b")]
        player.respond(input=[SAID, *turn, {"role": "assistant", "content": "4"}, SAID])
        said, *results, answer, _ = player.request.prompt.chat.messages[1:]
        assert (said.content, [call.id for call in said.tool_calls]) == ("\n".join(content), ["a", "b"])
        assert ([one.role for one in results], answer.content) == (["tool", "tool"], "4")


def test_messages_between_a_call_and_its_output_follow_both(player: Player) -> None:
    player.play("Hi")
    said, later = {**SAID, "content": "Now?"}, {**SAID, "content": "Then?"}
    player.respond(
        input=[SAID, called("a"), called("b"), said, returned("b"), later, returned("a"), called("c"), returned("c")]
    )
    messages = player.request.prompt.chat.messages
    assert [
        message.tool_call_id or message.content or [call.id for call in message.tool_calls] for message in messages
    ] == [
        SAID["content"],
        ["a", "b"],
        "b",
        "a",
        "Now?",
        "Then?",
        ["c"],
        "c",
    ]
