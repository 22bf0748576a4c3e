"""The engine that answers by a script, through a gateway."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.scripted_quire import CONVERSATION, KEY, SPENT_KEY, ScriptedQuire, scripted_quire
from tests.running_quire import CALL_SECONDS


@pytest.fixture(scope="module")
def scripted(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedQuire]:
    with scripted_quire(tiny_model("llama"), tmp_path_factory.mktemp("scripted")) as one:
        yield one


def chat(scripted: ScriptedQuire, messages: list[Any], key: str = KEY, **fields: Any) -> httpx.Response:
    tools = [{"type": "function", "function": tool} for tool in CONVERSATION["tools"]]
    body = {"messages": messages, "tools": tools, **fields}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{scripted.http_url}/v1/chat/completions", json=body, headers=headers, timeout=CALL_SECONDS)


def test_each_turn_follows_from_the_results_that_were_sent_back(scripted: ScriptedQuire) -> None:
    messages: list[Any] = [{"role": "user", "content": CONVERSATION["question"]}]
    results, names = iter(CONVERSATION["results"]), []
    for _ in range(3):
        choice = chat(scripted, messages).json()["choices"][0]
        messages.append(choice["message"])
        for call in choice["message"].get("tool_calls", ()):
            names.append(call["function"]["name"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": next(results)})
    assert names == [call["name"] for call in CONVERSATION["calls"]]
    assert messages[-1]["content"] == CONVERSATION["answer"]
    prompt = json.loads(scripted.prompts.read_text().splitlines()[-1])
    assert all(result in prompt for result in CONVERSATION["results"])


def test_answers_end_with_length_and_prompts_beyond_the_context_are_refused(scripted: ScriptedQuire) -> None:
    asked = [{"role": "user", "content": CONVERSATION["long_question"]}]
    cut = chat(scripted, asked, max_tokens=4).json()
    assert (cut["choices"][0]["finish_reason"], cut["usage"]["completion_tokens"]) == ("length", 4)
    assert chat(scripted, [{"role": "user", "content": "x y z " * 20_000}]).status_code == 400


def test_keys_are_wrong_or_spent(scripted: ScriptedQuire) -> None:
    asked = [{"role": "user", "content": CONVERSATION["long_question"]}]
    assert [chat(scripted, asked, key).status_code for key in (KEY, SPENT_KEY, "wrong")] == [200, 429, 401]
