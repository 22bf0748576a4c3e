"""Reads the streams of /v1/messages as Anthropic's clients do."""

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of all events, after a check that each has the name of its type."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    found = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def message_of(response: httpx.Response) -> dict[str, Any]:
    """Return the message that the events of a stream make up, after a check of their order."""
    first, *rest, delta, stop = events(response)
    assert (first["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: dict[str, Any] = first["message"]
    content: list[dict[str, Any]] = message["content"]
    arguments: dict[int, str] = {}
    is_open = False
    for one in rest:
        match one["type"]:
            case "ping":
                assert len(content) == 1
            case "content_block_start":
                assert (one["index"], is_open) == (len(content), False)
                content.append(one["content_block"])
                is_open = True
            case "content_block_delta":
                assert (one["index"], is_open) == (len(content) - 1, True)
                _grow(content[-1], one["delta"], arguments, one["index"])
            case "content_block_stop":
                assert (one["index"], is_open) == (len(content) - 1, True)
                is_open = False
    assert not is_open
    for at, text in arguments.items():
        content[at]["input"] = json.loads(text)
    assert delta["usage"].items() >= {**message["usage"], "output_tokens": delta["usage"]["output_tokens"]}.items()
    return {**message, **delta["delta"], "usage": delta["usage"]}


def _grow(block: dict[str, Any], delta: dict[str, Any], arguments: dict[int, str], at: int) -> None:
    match delta["type"]:
        case "text_delta":
            block["text"] += delta["text"]
        case "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "signature_delta":
            block["signature"] += delta["signature"]
        case "input_json_delta":
            assert block["type"] == "tool_use"
            arguments[at] = arguments.get(at, "") + delta["partial_json"]


def failure(response: httpx.Response) -> tuple[int, str, str]:
    """Return the status, the type and the message of an error, after a check of its form."""
    body = response.json()
    assert body.keys() == {"type", "error", "request_id"}, body
    assert (body["type"], body["error"].keys()) == ("error", {"type", "message"})
    assert body["request_id"] == response.headers["request-id"]
    assert response.headers["x-request-id"]
    return response.status_code, body["error"]["type"], body["error"]["message"]
