"""Codex's whole request, over two turns."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.http.responses_api.playing import Item, Player, call_of

REQUEST = json.loads((Path(__file__).parents[1] / "fixtures" / "codex_request.json").read_text())
PATCH = '*** Begin Patch\n*** Update File: x.py\n-a = "\\n é 😊"\n+b = 1\n*** End Patch\n'
FIRST = (
    "<think>\nFirst look, then patch.\n</think>\n\nI rename it."
    + call_of("exec_command", cmd="cat x.py")
    + call_of("apply_patch", input=PATCH)
    + call_of("mcp__docs__find", text="é")
)


def as_codex_keeps(items: list[Item]) -> list[Item]:
    """Return the items of a response as Codex sends them back: thoughts without their text."""
    kept = []
    for item in items:
        names = {"type", "role", "content", "name", "namespace", "arguments", "input", "call_id", "status"}
        if item["type"] == "reasoning":
            names = {"type", "summary", "encrypted_content"}
        elif item["type"] != "custom_tool_call":
            names -= {"status"}
        kept.append({name: value for name, value in item.items() if name in names})
    return kept


def outputs(items: list[Item]) -> list[Item]:
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    return [
        {"type": kinds[item["type"]], "call_id": item["call_id"], "output": f"done {at}"}
        for at, item in enumerate(items)
        if item["type"] in kinds
    ]


@pytest.mark.parametrize("stream", [True, False])
def test_codex_works_over_two_turns(player: Player, stream: bool) -> None:
    body: dict[str, Any] = {**REQUEST, "stream": stream, "max_output_tokens": None}
    player.play(FIRST)
    made = player.stream(**body)[-1]["response"] if stream else player.respond(**body)
    thought, message, run, patch, find = made["output"]
    assert [item["status"] for item in made["output"]] == ["completed"] * 5
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "First look, then patch."}]
    assert message["content"][0]["text"] == "I rename it."
    assert (run["name"], json.loads(run["arguments"])) == ("exec_command", {"cmd": "cat x.py"})
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", PATCH)
    assert (find["type"], find["namespace"], find["name"]) == ("function_call", "mcp__docs", "find")
    assert (made["store"], made["reasoning"]["effort"], made["text"]["verbosity"]) == (False, "medium", "low")
    assert [warning.split(":")[0] for warning in made["warnings"]] == [
        "tools[3] (web_search) is not offered to the model",
        "tools[5] (tool_search) is not offered to the model",
        "tools[6] (image_generation) is not offered to the model",
        "tools[7] (local_shell) is not offered to the model",
        "tools[2].format has no effect on calls",
    ]

    player.play("<think>\nIt works.\n</think>\n\nDone.")
    history = [*body["input"], *as_codex_keeps(made["output"]), *outputs(made["output"])]
    again = {**body, "input": history}
    made = player.stream(**again)[-1]["response"] if stream else player.respond(**again)
    assert [item["type"] for item in made["output"]] == ["reasoning", "message"]
    chat = player.request.prompt.chat
    said = chat.messages[-4]
    assert (said.role, said.content, said.reasoning) == ("assistant", "I rename it.", "First look, then patch.")
    calls = [(call.name, json.loads(call.arguments)) for call in said.tool_calls]
    assert calls == [
        ("exec_command", {"cmd": "cat x.py"}),
        ("apply_patch", {"input": PATCH}),
        ("mcp__docs__find", {"text": "é"}),
    ]
    assert [message.content for message in chat.messages[-3:]] == ["done 2", "done 3", "done 4"]


def test_the_model_is_offered_what_codex_runs(player: Player) -> None:
    player.play("Hi")
    player.stream(**REQUEST)
    chat = player.request.prompt.chat
    assert [tool.name for tool in chat.tools] == ["exec_command", "update_plan", "apply_patch", "mcp__docs__find"]
    grammar = REQUEST["tools"][2]["format"]["definition"]
    assert chat.tools[2].description == (
        f"{REQUEST['tools'][2]['description']}\n\nIts input follows this lark grammar:\n{grammar}"
    )
    assert json.loads(chat.tools[2].parameters) == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
        "additionalProperties": False,
    }
    assert chat.tools[3].description == "Tools of the server docs.\n\nFinds a page."
    variables = json.loads(chat.template_variables)
    assert variables == {"enable_thinking": True, "thinking": True, "reasoning_effort": "medium", "verbosity": "low"}


def test_commands_and_searches_of_earlier_sessions_are_accepted(player: Player) -> None:
    action = {"type": "exec", "command": ["ls"], "timeout_ms": 1000, "working_directory": "/repo", "env": {}}
    items = [
        *REQUEST["input"],
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAAAB"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "c1", "status": "completed", "action": action},
        {"type": "function_call_output", "call_id": "c1", "output": "x.py"},
        {"type": "local_shell_call", "id": "c2", "status": "completed", "action": action},
        {"type": "local_shell_call_output", "id": "c2", "output": "y.py", "status": "completed"},
    ]
    player.play("Hi")
    made = player.stream(**{**REQUEST, "input": items})[-1]["response"]
    assert made["warnings"][-1] == "input[4] (web_search_call) is left out of the conversation"
    first, _, second, result = player.request.prompt.chat.messages[-4:]
    assert [(one.tool_calls[0].name, json.loads(one.tool_calls[0].arguments)) for one in (first, second)] == [
        ("local_shell", action)
    ] * 2
    assert (first.reasoning, result.tool_call_id, result.content) == ("", "c2", "y.py")
