"""Tools of the Responses API that chats do not have, and the choice among tools."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.services.gateway.http.responses import rejection
from tests.services.gateway.http.responses_api.playing import SAID, Player, call_of

SUM = {"type": "function", "name": "sum", "parameters": {"type": "object"}}
PATCH = {"type": "custom", "name": "patch", "description": "Patches."}
SEARCH = {"type": "web_search_preview", "user_location": {"type": "approximate"}}
DOCS = {"type": "namespace", "name": "docs", "description": "Of docs.", "tools": [SUM, PATCH]}
ALL = [SEARCH, SUM, PATCH, DOCS]


def regex(definition: str) -> dict[str, Any]:
    return {**PATCH, "format": {"type": "grammar", "syntax": "regex", "definition": definition}}


def offered(player: Player) -> list[str]:
    return [tool.name for tool in player.request.prompt.chat.tools]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("auto", ["sum", "patch", "docs__sum", "docs__patch"]),
        ("none", []),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "patch"}]}, ["patch"]),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    {"type": "function", "name": "sum", "namespace": "docs"},
                    {"type": "web_search_preview"},
                    {"type": "function", "name": "sum"},
                ],
            },
            ["sum", "docs__sum"],
        ),
    ],
)
def test_the_choice_says_which_tools_are_offered(player: Player, choice: Any, names: list[str]) -> None:
    player.play("Hi")
    made = player.respond(tools=ALL, tool_choice=choice)
    assert offered(player) == names
    assert made["tool_choice"] == choice
    assert [tool["type"] for tool in made["tools"]] == [tool["type"] for tool in ALL]
    warnings = ["tools[0] (web_search_preview) is not offered to the model: built-in tools are not run"]
    assert made.get("warnings", []) == ([] if choice == "none" else warnings)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        (ALL, {"type": "custom", "name": "sum"}, "tool_choice"),
        (ALL, {"type": "function", "name": "docs__sum"}, "tool_choice"),
        (ALL, {"type": "web_search_preview"}, "tool_choice.type"),
        ([SEARCH], "required", "tool_choice"),
        (ALL, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search_preview"}]}, "tool_choice"),
        (
            ALL,
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "patch"}]},
            "tool_choice.tools[0]",
        ),
        ([SEARCH, SUM, SUM], "auto", "tools[2].name"),
        ([SEARCH, SUM, {**DOCS, "tools": [PATCH, PATCH]}], "auto", "tools[2].tools[1].name"),
        ([SEARCH, {**SUM, "parameters": {"type": "array"}}], "auto", "tools[1].parameters"),
        ([SEARCH, SUM, regex("(")], "required", "tools[2].format.definition"),
        ([SEARCH, SUM, regex("(")], "auto", "tools[2].format.definition"),
    ],
)
def test_a_fault_of_a_tool_names_its_place_in_the_body(
    http: httpx.Client, tools: list[Any], choice: Any, param: str
) -> None:
    body = {"input": "Hi", "max_output_tokens": 4, "tools": tools, "tool_choice": choice}
    error = http.post("/v1/responses", json=body)
    assert rejection(error)[0] == 400
    assert error.json()["error"]["param"] == param, error.text
    assert param in error.json()["error"]["message"]
    assert not re.search(r"docs__patch\"? is|properties/input|\.function", error.json()["error"]["message"]), error.text


@pytest.mark.parametrize("pattern", ["[ab]{3,5}", "^[ab]{3,5}$", "aaa|[ab]{3,5}"])
def test_an_input_of_a_required_call_follows_its_regular_expression(http: httpx.Client, pattern: str) -> None:
    body = {"input": "Hi", "max_output_tokens": 120, "tools": [SEARCH, SUM, regex(pattern)], "seed": 4}
    body["tool_choice"] = {"type": "custom", "name": "patch"}
    made = http.post("/v1/responses", json=body).json()
    (item,) = made["output"]
    assert (item["type"], item["name"], item["status"]) == ("custom_tool_call", "patch", "completed")
    assert re.fullmatch(pattern.strip("^$"), item["input"])


def test_a_call_in_a_namespace_keeps_it(player: Player) -> None:
    player.play(call_of("docs__sum", a=1) + call_of("docs__patch", input="x"))
    made, _ = player.both(tools=ALL)
    first, second = made["output"]
    assert (first["type"], first["namespace"], first["name"]) == ("function_call", "docs", "sum")
    assert (second["type"], second["namespace"], second["name"], second["input"]) == (
        "custom_tool_call",
        "docs",
        "patch",
        "x",
    )
    results = [
        {"type": kind, "call_id": item["call_id"], "output": "y"}
        for kind, item in zip(("function_call_output", "custom_tool_call_output"), made["output"], strict=True)
    ]
    player.respond(input=[SAID, first, second, *results], tools=ALL)
    calls = player.request.prompt.chat.messages[1].tool_calls
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [
        ("docs__sum", {"a": 1}),
        ("docs__patch", {"input": "x"}),
    ]


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({}, {}),
        ({"reasoning": None, "text": None}, {}),
        ({"reasoning": {}, "text": {}}, {}),
        ({"reasoning": {"effort": None, "summary": "detailed", "generate_summary": "concise"}}, {}),
        ({"reasoning": {"effort": "none"}}, {"enable_thinking": False, "thinking": False}),
        (
            {"reasoning": {"effort": "high", "context": "auto", "mode": "standard"}},
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
        ),
        ({"text": {"verbosity": "high"}}, {"verbosity": "high"}),
        ({"text": {"verbosity": "high"}, "chat_template_kwargs": {"verbosity": "x"}}, {"verbosity": "x"}),
    ],
)
def test_reasoning_and_verbosity_are_variables_of_the_template(
    player: Player, body: dict[str, Any], variables: dict[str, Any]
) -> None:
    player.play("Hi")
    made = player.respond(**body)
    given = player.request.prompt.chat.template_variables
    assert (json.loads(given) if given else {}) == variables
    assert made["reasoning"] == {"effort": (body.get("reasoning") or {}).get("effort"), "summary": None}


def test_what_cannot_change_the_answer_is_accepted(player: Player) -> None:
    neutral: dict[str, Any] = {
        "store": True,
        "background": False,
        "truncation": "auto",
        "include": ["file_search_call.results", "web_search_call.action.sources", "reasoning.encrypted_content"],
        "client_metadata": {"session": {"id": 1}},
        "prompt_cache_key": "x",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
        "safety_identifier": "x",
        "service_tier": "flex",
        "max_tool_calls": 3,
        "context_management": [],
        "moderation": None,
        "conversation": None,
        "previous_response_id": None,
        "stream_options": {"include_obfuscation": False},
        "metadata": {"a": "b"},
        "user": "x",
    }
    player.play("Hi")
    made = player.respond(**neutral)
    assert (made["store"], made["truncation"], made["max_tool_calls"]) == (False, "disabled", 3)
    sent = type(player.request)()
    sent.CopyFrom(player.request)
    player.respond()
    sent.request_id = player.request.request_id
    assert sent == player.request


def test_the_tokens_of_an_input_are_those_of_its_usage(http: httpx.Client) -> None:
    body: dict[str, Any] = {"input": [SAID], "instructions": "Be brief.", "tools": [SUM, DOCS], "max_output_tokens": 2}
    counted = http.post("/v1/responses/input_tokens", json=body)
    assert counted.json() == {
        "object": "response.input_tokens",
        "input_tokens": http.post("/v1/responses", json=body).json()["usage"]["input_tokens"],
    }
    wrong = http.post("/v1/responses/input_tokens", json={**body, "tools": [SUM, {**SUM, "name": ""}]})
    assert wrong.json()["error"]["param"] == "tools[1].name"
