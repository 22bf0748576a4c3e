"""The token ids of prompts at /v1/completions/render and /v1/chat/completions/render, which routers ask for.

That they refuse what generations refuse is tested in test_refusals.py.
"""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.running_quire import RunningQuire
from tests.scrape import Scrape
from tests.services.gateway.http.responses import rejection
from tests.services.gateway.http.scripted_server import ScriptedServer

USER = {"role": "user", "content": "Why is the sky blue?"}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What vllm-router adds to a chat before it asks for its token ids.
ADDED = {
    "stream": True,
    "logprobs": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "continue_final_message": False,
    "separate_reasoning": True,
    "stream_reasoning": True,
    "return_hidden_states": False,
    "include_reasoning": True,
}


def rendered(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(f"{path}/render", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def generated(http: httpx.Client, path: str, **body: Any) -> Any:
    answer = http.post(path, json={**body, "stream": False, "max_tokens": 1, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [TOOL], "tool_choice": "required"},
        {"chat_template_kwargs": {"custom": 1}},
        {"messages": [USER, {"role": "assistant", "content": "Because"}], "continue_final_message": True},
        {"truncate_prompt_tokens": 5},
        {"use_beam_search": True, "n": 2},
        ADDED,
    ],
)
def test_a_rendered_chat_has_the_tokens_of_its_generation(http: httpx.Client, body: dict[str, Any]) -> None:
    given = {"messages": [USER], "temperature": 0, **body}
    answer = rendered(http, CHATS, **given)
    assert answer["token_ids"] == generated(http, CHATS, **given)["prompt_token_ids"]
    assert answer["model"] == http.get("/v1/models").json()["data"][0]["id"]
    assert answer["request_id"].startswith("chatcmpl-")


@pytest.mark.parametrize("prompt", ["Once", ["Once", "upon a time"], [3, 4, 5], [[3, 4, 5], [6]]])
def test_each_prompt_of_a_completion_is_rendered(http: httpx.Client, prompt: Any) -> None:
    answer = rendered(http, COMPLETIONS, prompt=prompt)
    choices = generated(http, COMPLETIONS, prompt=prompt)["choices"]
    assert [one["token_ids"] for one in answer] == [one["prompt_token_ids"] for one in choices]


def test_the_ids_of_requests_are_those_of_their_generations(http: httpx.Client) -> None:
    one, two = rendered(http, COMPLETIONS, prompt=["a", "b"], request_id="mine")
    assert (one["request_id"], two["request_id"]) == ("cmpl-mine-0", "cmpl-mine-1")
    assert rendered(http, CHATS, messages=[USER], request_id="mine")["request_id"] == "chatcmpl-mine"


def test_nothing_is_generated(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    def submitted() -> float:
        shown = Scrape.of(tiny_quire.metrics_urls["gateway"])
        return sum(shown.values("quire_request_success_total", "finished_reason").values())

    before = submitted()
    rendered(http, COMPLETIONS, prompt="Once upon a time", max_tokens=100)
    rendered(http, CHATS, messages=[USER], max_tokens=100)
    assert submitted() == before
    assert http.get("/load").json() == {"server_load": 0}


def test_an_unknown_model_is_named(http: httpx.Client) -> None:
    for path, body in ((CHATS, {"messages": [USER]}), (COMPLETIONS, {"prompt": "x"})):
        answer = http.post(f"{path}/render", json={**body, "model": "nobody"})
        assert (*rejection(answer), answer.json()["error"]["param"]) == (404, "model_not_found", "model")


def test_a_prompt_beyond_the_context_is_refused(http: httpx.Client) -> None:
    for path, body, param in (
        (CHATS, {"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
        (COMPLETIONS, {"prompt": ["x", "x " * 3000]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [5] * 3000}, "prompt"),
    ):
        answer = http.post(f"{path}/render", json=body)
        assert (*rejection(answer), answer.json()["error"]["param"]) == (400, "context_length_exceeded", param)


def test_a_rendering_needs_a_valid_key(tiny_model: Callable[[str], Path]) -> None:
    with closing(ScriptedServer(tiny_model("llama"))) as server:
        answer = server.client.post(
            f"{COMPLETIONS}/render", json={"prompt": "x"}, headers={"authorization": "Bearer wrong"}
        )
        assert rejection(answer) == (401, "invalid_api_key")
