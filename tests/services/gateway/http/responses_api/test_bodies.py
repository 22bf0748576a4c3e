"""Bodies of /v1/responses that are wrong somewhere."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import httpx

CODEX = json.loads((Path(__file__).parents[1] / "fixtures" / "codex_request.json").read_text())
COUNT = 400
# Besides what is in a body: nulls, wrong types, and values at the limits of their types.
VALUES: list[Any] = [None, True, False, 0, -1, 2**31, 2**70, 0.5, "", "x", "message", [], {}, [None], {"type": None}]
VALUES += [
    {"type": "text"},
    [{"type": "input_text", "text": "x"}],
    {"type": []},
    {"type": {"a": 1}},
    "\ud83d",
    "a" * 5000,
]
NAMES = ["type", "id", "call_id", "name", "input", "format", "namespace", "unknown", "tools", "mode", "a.b", "é"]


def valid() -> dict[str, Any]:
    text = {"type": "output_text", "text": "Well.", "annotations": [], "logprobs": []}
    thought = {"type": "reasoning_text", "text": "Hm."}
    items = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought], "encrypted_content": "x"},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [text]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "update_plan", "arguments": "{}"},
        {"type": "custom_tool_call", "id": "ctc_1", "call_id": "c2", "name": "apply_patch", "input": "x"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "x"}]},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "x"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec"}, "status": "completed"},
        {"type": "local_shell_call_output", "id": "c3", "output": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {}},
    ]
    allowed = [{"type": "function", "name": "update_plan"}, {"type": "custom", "name": "apply_patch"}]
    body = copy.deepcopy(CODEX) | {"model": "", "stream": False, "max_output_tokens": 1, "metadata": {"a": "b"}}
    body["instructions"], body["input"] = "Be brief.", [body["input"][0], *items]
    body["tools"][:2] = [{"type": "function", "name": "update_plan", "strict": False, "parameters": {"type": "object"}}]
    body["tool_choice"] = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
    body["text"]["format"] = {"type": "text"}
    pattern = {"type": "grammar", "syntax": "regex", "definition": "[ab]+"}
    body["tools"].append({"type": "custom", "name": "letters", "format": pattern})
    return body


def places(part: Any) -> list[tuple[Any, Any]]:
    """Return all containers of a body, each with the keys of its members."""
    members = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    return [found for key, value in members for found in [(part, key), *places(value)]]


def spoil(body: dict[str, Any], rng: random.Random) -> None:
    part, key = rng.choice(places(body))
    match rng.randrange(5):
        case 0:
            del part[key]
        case 1 if isinstance(part, dict):
            part[rng.choice(NAMES)] = copy.deepcopy(rng.choice(VALUES))
        case 2:
            _, other = source = rng.choice(places(body))
            part[key] = copy.deepcopy(source[0][other])
        case _:
            part[key] = copy.deepcopy(rng.choice(VALUES))


def test_a_wrong_body_is_refused_by_the_name_of_a_field(http: httpx.Client) -> None:
    rng, statuses, fields = random.Random(52), set(), set()
    right = http.post("/v1/responses", json=valid())
    assert right.status_code == 200, right.text
    for _ in range(COUNT):
        body = valid()
        for _ in range(rng.choice([1, 1, 2, 4])):
            spoil(body, rng)
        answer = http.post("/v1/responses", content=json.dumps(body), headers={"content-type": "application/json"})
        statuses.add(answer.status_code)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert answer.status_code in (400, 404), (answer.text, body)
            assert error["param"] or error["code"] == "invalid_json", (error, body)
            assert error["code"] == "invalid_json" or error["param"] in error["message"], (error, body)
            fields.add(error["param"])
    assert statuses >= {200, 400}
    assert len(fields) > 100
