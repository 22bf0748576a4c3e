"""Token ids in responses: of prompts, also truncated ones, of outputs, and of what ended them."""

from typing import Any

import httpx
import pytest

from tests.services.gateway.http.responses import events

PROMPT = "The quick brown fox jumps"
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
END = 0  # the model's end-of-sequence token
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHATS])


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    return {**prompt, "seed": 7, "max_tokens": 12, **fields}


def prompt_ids(http: httpx.Client, path: str) -> list[int]:
    prompt = {"prompt": PROMPT} if path == COMPLETIONS else {"messages": MESSAGES}
    return list(http.post("/tokenize", json=prompt).json()["tokens"])


@PATHS
def test_a_response_has_the_token_ids_of_prompt_and_choices_if_asked(http: httpx.Client, path: str) -> None:
    answer = http.post(path, json=body_for(path, n=2, return_token_ids=True)).json()
    holders = answer["choices"] if path == COMPLETIONS else [answer]
    assert [holder["prompt_token_ids"] for holder in holders] == [prompt_ids(http, path)] * len(holders)
    texts = [http.post("/detokenize", json={"tokens": choice["token_ids"]}).json() for choice in answer["choices"]]
    written = [choice["text"] if path == COMPLETIONS else choice["message"]["content"] for choice in answer["choices"]]
    assert [text["prompt"] for text in texts] == written
    assert sum(len(choice["token_ids"]) for choice in answer["choices"]) == answer["usage"]["completion_tokens"]
    without = http.post(path, json=body_for(path, n=2)).json()
    assert "prompt_token_ids" not in without
    assert not any(name.endswith("token_ids") for choice in without["choices"] for name in choice)


@PATHS
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_stream_has_the_prompt_first_and_each_token_id_once(http: httpx.Client, path: str, logprobs: bool) -> None:
    scores = {"logprobs": 1 if path == COMPLETIONS else True} if logprobs else {}
    body = body_for(path, return_token_ids=True, stop=["zz"], **scores)
    whole = http.post(path, json=body).json()["choices"][0]["token_ids"]
    chunks = list(events(http.post(path, json={**body, "stream": True})))
    holders = [chunk["choices"][0] if path == COMPLETIONS else chunk for chunk in chunks]
    assert holders[0]["prompt_token_ids"] == prompt_ids(http, path)
    assert not any("prompt_token_ids" in holder for holder in holders[1:])
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])] == whole


@PATHS
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"logit_bias": {str(END): 100}}, None),
        ({"logit_bias": {"70": 100}, "stop_token_ids": [70]}, 70),
        ({"logit_bias": {str(END): 100}, "stop_token_ids": [END], "ignore_eos": True}, END),
        ({"logit_bias": {"70": 100}, "stop": ["TEXT OF 70"]}, "TEXT OF 70"),
    ],
    ids=["end of the sequence", "stop token", "end given as stop token", "stop string"],
)
def test_stop_reason_is_what_the_client_gave(
    http: httpx.Client, path: str, fields: dict[str, Any], reason: str | int | None
) -> None:
    if "stop" in fields:
        reason = http.post("/detokenize", json={"tokens": [70]}).json()["prompt"]
        fields = {**fields, "stop": [reason]}
    body = body_for(path, **fields)
    choice = http.post(path, json=body).json()["choices"][0]
    *_, last = events(http.post(path, json={**body, "stream": True}))
    for end in (choice, last["choices"][0]):
        assert end["finish_reason"] == "stop"
        assert end["stop_reason"] == reason


def test_echo_and_scores_concern_the_truncated_prompt(http: httpx.Client) -> None:
    kept = prompt_ids(http, COMPLETIONS)[-4:]
    text = http.post("/detokenize", json={"tokens": kept}).json()["prompt"]
    body = body_for(COMPLETIONS, truncate_prompt_tokens=4, echo=True, prompt_logprobs=0, return_token_ids=True)
    answer = http.post(COMPLETIONS, json=body).json()
    choice = answer["choices"][0]
    assert choice["text"].startswith(text)
    assert len(choice["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == 4
    assert choice["prompt_token_ids"] == kept
    whole = http.post(COMPLETIONS, json=body_for(COMPLETIONS, prompt=kept, echo=True)).json()["choices"][0]
    assert whole["text"] == choice["text"]


def test_a_truncated_chat_is_the_end_of_its_rendered_form(http: httpx.Client) -> None:
    body = body_for(CHATS, truncate_prompt_tokens=6, return_token_ids=True, prompt_logprobs=0)
    answer = http.post(CHATS, json=body).json()
    assert answer["prompt_token_ids"] == prompt_ids(http, CHATS)[-6:]
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == 6
