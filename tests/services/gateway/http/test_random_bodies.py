"""No body is a server error, with nulls, wrong types, missing or unknown members anywhere; errors name a field."""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import httpx
import pytest

BODIES_OF_EACH_PATH = 400
SCHEMA = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 4}}, "required": ["place"]}
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True}
CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"place": "sea"}'}}
COMMON: dict[str, Any] = {
    "model": "tiny-llama",
    "n": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.0,
    "seed": 3,
    "stop": ["~~"],
    "stop_token_ids": [7],
    "logit_bias": {"5": -1},
    "presence_penalty": 0.1,
    "stream": False,
    "stream_options": {"include_usage": True},
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "timeout": 30,
    "priority": 0,
    "cache_salt": "s",
    "request_id": None,
    "max_tokens": 1,
}
CHAT: dict[str, Any] = {
    **COMMON,
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "a", "content": "A ship."},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "logprobs": True,
    "top_logprobs": 2,
    "chat_template_kwargs": {"a": 1},
    "thinking": {"type": "enabled", "budget_tokens": 5},
    "verbosity": "low",
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
}
COMPLETION: dict[str, Any] = {
    **COMMON,
    "prompt": ["a", "b"],
    "echo": True,
    "logprobs": 1,
    "suffix": "",
    "best_of": 1,
    "bad_words": ["zz"],
}
OTHERS: tuple[Any, ...] = (None, None, None, 0, -1, 1.5, True, "", "x", [], {}, [None], {"a": None}, 10**30, [[]])


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a body can be changed."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in items:
        yield from places(member, (*path, key))


def changed(body: dict[str, Any], source: random.Random) -> dict[str, Any]:
    """A body with up to three changes."""
    body = deepcopy(body)
    for _ in range(source.randint(1, 3)):
        *way, last = source.choice(list(places(body)))
        parent: Any = body
        for key in way:
            parent = parent[key]
        kind = source.random()
        if kind < 0.2:
            del parent[last]
        elif kind < 0.3 and isinstance(parent, dict):
            parent["unknown"] = deepcopy(source.choice(OTHERS))
        else:
            parent[last] = deepcopy(source.choice(OTHERS))
        if not list(places(body)):
            break
    return body


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_no_body_is_a_server_error_and_every_refusal_names_its_field(
    http: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    source = random.Random(52)
    assert (unchanged := http.post(path, json=body)).status_code == 200, unchanged.text
    statuses = set[int]()
    for _ in range(BODIES_OF_EACH_PATH):
        one = changed(body, source)
        answer = http.post(path, json=one)
        statuses.add(answer.status_code)
        assert answer.status_code in (200, 400, 404), (answer.text, one)
        if answer.status_code != 200:
            assert answer.json()["error"]["param"], (answer.text, one)
            assert answer.json()["error"]["param"].split("[")[0].split(".")[0] in answer.json()["error"]["message"]
    assert statuses >= {200, 400}
