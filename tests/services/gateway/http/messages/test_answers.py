"""Answers of /v1/messages, whole and streamed, with a handler whose output the test sets."""

from typing import Any

import pytest

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.http.anthropic.content_blocks import SIGNATURE
from services.runtime.errors import GenerationFailed
from tests.services.gateway.http.messages.streams import events, failure, message_of
from tests.services.gateway.http.scripted_server import ScriptedServer

ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9}
NOW = {"name": "now", "input_schema": {"type": "object"}}
LOOK = {
    "name": "look",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
CALL = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
SEA = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'


def answer(server: ScriptedServer, *texts: str, **body: Any) -> dict[str, Any]:
    """Return the answer of a model that writes these texts, after a check that a stream has the same."""
    tokenizer = server.handler.own_tokenizer
    server.handler.script = [(text, tokenizer.encode_parts([text])[0]) for text in texts]
    whole = server.client.post("/v1/messages", json={**ASK, **body})
    assert whole.status_code == 200, whole.text
    streamed = message_of(server.client.post("/v1/messages", json={**ASK, **body, "stream": True}))
    message: dict[str, Any] = whole.json()
    assert with_ids_checked(streamed) == with_ids_checked(message)
    return message


def with_ids_checked(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without the ids that are new in each answer."""
    assert message["id"].startswith("msg_")
    ids = [block["id"] for block in message["content"] if block["type"] == "tool_use"]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    content = [{name: value for name, value in one.items() if name != "id"} for one in message["content"]]
    return {**message, "id": "", "content": content}


def test_an_answer_is_one_text(server: ScriptedServer) -> None:
    message = answer(server, "Good", " morning", "")
    assert message["content"] == [{"type": "text", "text": "Good morning"}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "played")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)


def test_an_empty_answer_has_no_content(server: ScriptedServer) -> None:
    assert answer(server, "")["content"] == []


def test_blocks_have_the_order_in_which_they_were_generated(server: ScriptedServer) -> None:
    texts = ("<think>", "Both", ".</think>", "I look.", f"{CALL}{SEA}", "<think>Hm.</think>", "Done.")
    message = answer(server, *texts, tools=[NOW, LOOK])
    assert [{**block, "id": "x"} if "id" in block else block for block in message["content"]] == [
        {"type": "thinking", "thinking": "Both.", "signature": SIGNATURE},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "x", "name": "now", "input": {}},
        {"type": "tool_use", "id": "x", "name": "look", "input": {"at": "sea"}},
        {"type": "thinking", "thinking": "Hm.", "signature": SIGNATURE},
        {"type": "text", "text": "Done."},
    ]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_arguments_stream_as_they_are_written(server: ScriptedServer) -> None:
    answer(server, '<tool_call>{"name": "look", "arguments": {"at": "', "s", "e", "a", '"}}</tool_call>', tools=[LOOK])
    streamed = events(server.client.post("/v1/messages", json={**ASK, "tools": [LOOK], "stream": True}))
    parts = [one["delta"]["partial_json"] for one in streamed if one["type"] == "content_block_delta"]
    assert "".join(parts) == '{"at": "sea"}'
    assert {"s", "e", "a"} <= set(parts)


def test_thoughts_that_are_left_out_come_back_in_their_signatures(server: ScriptedServer) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5, "display": "omitted"}
    message = answer(server, "<think>Hm.</think>Yes.", thinking=thinking)
    thought, text = message["content"]
    assert (thought["thinking"], text) == ("", {"type": "text", "text": "Yes."})
    history = [*ASK["messages"], {"role": "assistant", "content": message["content"]}, *ASK["messages"]]
    answer(server, "x", messages=history)
    assert server.handler.requests[-1].prompt.chat.messages[1].reasoning == "Hm."


def test_calls_behind_the_first_are_dropped_without_parallel_use(server: ScriptedServer) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = answer(server, CALL, SEA, tools=[NOW, LOOK], tool_choice=choice)
    assert [block["name"] for block in message["content"]] == ["now"]


def test_arguments_that_are_no_object_are_kept_under_a_name(server: ScriptedServer) -> None:
    broken = '<tool_call>{"name": "look", "arguments": {"at": "s'
    server.handler.script = [(broken, [1])]
    message = server.client.post("/v1/messages", json={**ASK, "tools": [LOOK]}).json()
    assert message["content"][0]["input"] == {"INVALID_JSON": '{"at": "s'}
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    "arguments", ['{"a": "\\ud83d"}', '{"\\ud83d": 1}', '{"a": NaN}', '{"a": [-Infinity]}', '{"a": 1e999}']
)
def test_arguments_that_no_answer_can_have_are_kept_under_a_name(server: ScriptedServer, arguments: str) -> None:
    server.handler.script = [(f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>', [1])]
    answer = server.client.post("/v1/messages", json={**ASK, "tools": [LOOK]})
    assert answer.status_code == 200
    assert answer.json()["content"][0]["input"] == {"INVALID_JSON": arguments}


def test_the_stream_begins_with_the_message_a_block_and_a_ping(server: ScriptedServer) -> None:
    answer(server, "a", "b")
    streamed = events(server.client.post("/v1/messages", json={**ASK, "stream": True}))
    assert [one["type"] for one in streamed] == [
        "message_start",
        "content_block_start",
        "ping",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = streamed[0]["message"]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)


@pytest.mark.parametrize(
    ("end", "generated", "reason", "stop_sequence"),
    [
        ({"reason": decoding_pb2.FINISH_REASON_LENGTH}, 9, "max_tokens", None),
        ({"reason": decoding_pb2.FINISH_REASON_LENGTH}, 8, "model_context_window_exceeded", None),
        ({"reason": decoding_pb2.FINISH_REASON_STOP, "stop_string": "~~"}, 3, "stop_sequence", "~~"),
        ({"reason": decoding_pb2.FINISH_REASON_STOP, "stop_token_id": 2}, 3, "end_turn", None),
    ],
)
def test_the_reason_of_the_end_is_one_of_anthropic_s(
    server: ScriptedServer, end: dict[str, Any], generated: int, reason: str, stop_sequence: str | None
) -> None:
    usage = gateway_pb2.Usage(prompt_tokens=7, cached_tokens=4, generated_tokens=generated)
    server.handler.finished = gateway_pb2.Finished(samples=[gateway_pb2.SampleFinish(**end)], usage=usage)
    message = answer(server, "a")
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop_sequence)
    assert message["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": generated,
        "output_tokens_details": {"thinking_tokens": 0},
    }


def test_an_error_in_mid_stream_is_an_event(server: ScriptedServer) -> None:
    server.handler.failure = GenerationFailed("the step failed")
    response = server.client.post("/v1/messages", json={**ASK, "stream": True})
    last = events(response)[-1]
    assert last["error"] == {"type": "api_error", "message": "the step failed"}
    assert last["request_id"] == response.headers["request-id"]
    assert failure(server.client.post("/v1/messages", json=ASK))[:2] == (500, "api_error")


def test_an_unexpected_error_in_mid_stream_has_no_details(server: ScriptedServer) -> None:
    server.handler.failure = RuntimeError("secret")
    last = events(server.client.post("/v1/messages", json={**ASK, "stream": True}))[-1]
    assert last["error"]["type"] == "api_error"
    assert "secret" not in last["error"]["message"]
