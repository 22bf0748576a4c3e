"""The events of streamed responses with thoughts, texts and calls."""

import json
from collections import defaultdict
from typing import Any

import pytest

from services.gateway.http.thought_carrier import carried
from tests.services.gateway.http.responses_api.playing import SAID, Player, call_of

FUNCTION = {"type": "function", "name": "sum", "parameters": {"type": "object"}}
CUSTOM = {"type": "custom", "name": "patch"}
TEXT = 'a "quoted" \\ line\n\té 漢 😊'


def test_ids_are_the_same_in_all_events(player: Player) -> None:
    player.play(f"<think>Hm.</think>Well.{call_of('sum', a=1)}{call_of('patch', input=TEXT)}{call_of('sum')}")
    for seed in range(20):
        events = player.stream(tools=[FUNCTION, CUSTOM], include=["reasoning.encrypted_content"])
        started, done, by_item = [], [], defaultdict[str, list[str]](list)
        for event in events:
            kind = event["type"].removeprefix("response.")
            if kind == "output_item.added":
                assert event["output_index"] == len(started)
                started.append(event["item"])
            elif kind == "output_item.done":
                assert event["output_index"] == len(done)
                done.append(event["item"])
            elif "item_id" in event:
                assert started[event["output_index"]]["id"] == event["item_id"]
                by_item[event["item_id"]].append(kind)
        assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
        assert len({event["response"]["id"] for event in (*events[:2], events[-1])}) == 1
        assert events[-1]["type"] == "response.completed"
        assert events[-1]["response"]["output"] == done
        for before, after in zip(started, done, strict=True):
            same = ("id", "type", "call_id", "name", "role")
            assert [before.get(name) for name in same] == [after.get(name) for name in same]
            assert (before["status"], after["status"]) == ("in_progress", "completed")
        assert len({item["id"] for item in done}) == len(done) == 5
        assert [by_item[item["id"]][-1] for item in done] == [
            "content_part.done",
            "content_part.done",
            "function_call_arguments.done",
            "custom_tool_call_input.done",
            "function_call_arguments.done",
        ]
        player.play(f"<think>Hm.</think>Well.{call_of('sum', a=1)}{call_of('patch', input=TEXT)}{call_of('sum')}", seed)


def test_items_of_two_responses_have_different_ids_even_if_the_request_id_is_the_same(player: Player) -> None:
    player.play("Well.")
    ids = {player.respond(request_id="mine")["output"][0]["id"] for _ in range(3)}
    assert len(ids) == 3


def test_the_input_of_a_custom_tool_is_streamed_without_escapes(player: Player) -> None:
    for seed in range(20):
        player.play(call_of("patch", input=TEXT), seed)
        made, events = player.both(tools=[CUSTOM])
        (item,) = made["output"]
        assert (item["type"], item["name"], item["input"], item["status"]) == (
            "custom_tool_call",
            "patch",
            TEXT,
            "completed",
        )
        deltas = [one["delta"] for one in events if one["type"] == "response.custom_tool_call_input.delta"]
        (done,) = [one["input"] for one in events if one["type"] == "response.custom_tool_call_input.done"]
        assert "".join(deltas) == done == TEXT
        assert len(deltas) > 1


def test_a_call_without_arguments_is_done_with_an_empty_object(player: Player) -> None:
    player.play('<tool_call>{"name": "sum"}</tool_call>')
    made, events = player.both(tools=[FUNCTION])
    (done,) = [one for one in events if one["type"] == "response.function_call_arguments.done"]
    assert made["output"][0]["arguments"] == done["arguments"] == "{}"
    assert (done["name"], done["item_id"]) == ("sum", events[-1]["response"]["output"][0]["id"])


@pytest.mark.parametrize(
    ("written", "field", "kind", "kept"),
    [
        ('<tool_call>{"name": "sum", "arguments": {"a', "arguments", "function_call_arguments", '{"a'),
        ('<tool_call>{"name": "patch", "arguments": {"input": "a\\nb\\', "input", "custom_tool_call_input", "a\nb"),
        ('<tool_call>{"name": "patch", "arguments": {"in', "input", "custom_tool_call_input", '{"in'),
    ],
)
@pytest.mark.parametrize("at_limit", [True, False], ids=["limit", "stop string"])
def test_a_call_that_the_end_cuts_is_done_with_what_is_written(
    player: Player, written: str, field: str, kind: str, kept: str, at_limit: bool
) -> None:
    player.play(written)
    player.server.handler.ends_at_limit = at_limit
    made, events = player.both(tools=[FUNCTION, CUSTOM])
    (done,) = [one for one in events if one["type"] == f"response.{kind}.done"]
    deltas = [one["delta"] for one in events if one["type"] == f"response.{kind}.delta"]
    assert "".join(deltas) == done[field] == made["output"][0][field] == kept
    assert made["output"][0]["status"] == "incomplete"
    assert made["status"] == ("incomplete" if at_limit else "completed")
    assert events[-1]["type"] == f"response.{made['status']}"


def test_a_thought_comes_back_from_clients_that_keep_only_its_encrypted_content(player: Player) -> None:
    player.play("<think>\nHm 😊.\n</think>Well.")
    made, _ = player.both(include=["reasoning.encrypted_content"])
    thought, message = made["output"]
    assert thought["content"][0]["text"] == "Hm 😊."
    kept = {"type": "reasoning", "id": thought["id"], "summary": []}
    for item, reasoning in (
        ({**kept, "encrypted_content": thought["encrypted_content"]}, "Hm 😊."),
        ({**kept, "encrypted_content": thought["encrypted_content"], "content": None}, "Hm 😊."),
        ({**kept, "encrypted_content": thought["encrypted_content"], "content": []}, "Hm 😊."),
        ({**kept, "encrypted_content": carried("Old"), "content": thought["content"]}, "Hm 😊."),
        ({**kept, "encrypted_content": "gAAAAABo"}, ""),
        ({**kept, "encrypted_content": thought["encrypted_content"][:-3] + "?"}, ""),
        ({**kept, "encrypted_content": None}, ""),
    ):
        player.respond(input=[SAID, item, message, SAID])
        assert player.request.prompt.chat.messages[1].reasoning == reasoning
    assert "encrypted_content" not in player.respond()["output"][0]


def test_a_thought_between_a_message_and_its_call_is_kept(player: Player) -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "1", "name": "sum", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "2"}
    said = {"role": "assistant", "content": "Well."}
    player.play("Hi")
    player.respond(input=[SAID, thought("One."), thought("Two."), said, thought("Three."), call, result])
    message = player.request.prompt.chat.messages[1]
    assert (message.content, message.reasoning) == ("Well.", "One.\nTwo.\nThree.")
    assert json.loads(message.tool_calls[0].arguments) == {}
