"""How a chat becomes a prompt over HTTP; the rendering itself is tested in tests/services/gateway/text."""

from typing import Any

import httpx

from quire.v1 import gateway_pb2
from tests.running_quire import CALL_SECONDS, RunningQuire

USER = {"role": "user", "content": "Count: 1, 2"}


def tokenized(http: httpx.Client, *messages: dict[str, Any], **fields: Any) -> list[int]:
    response = http.post("/tokenize", json={"messages": messages, **fields})
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["tokens"]
    return ids


def text_of(http: httpx.Client, ids: list[int]) -> str:
    text: str = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    return text


def test_text_parts_are_joined_by_new_lines(http: httpx.Client) -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two", "")]
    joined = {"role": "user", "content": "one\ntwo\n"}
    assert tokenized(http, {"role": "user", "content": parts}) == tokenized(http, joined)


def test_a_turn_is_opened_or_not_or_the_last_one_continued(http: httpx.Client) -> None:
    last = {"role": "assistant", "content": "3, 4"}
    closed = text_of(http, tokenized(http, USER, last, add_generation_prompt=False))
    assert text_of(http, tokenized(http, USER, last)) == closed + "<|assistant|>"
    assert text_of(http, tokenized(http, USER, last, continue_final_message=True)) == closed.removesuffix("\n")


def test_a_generation_has_the_prompt_of_tokenize(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    messages = [USER, {"role": "assistant", "content": "<|end|>3, 4"}]
    ids = tokenized(http, *messages, continue_final_message=True)
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 2, "return_token_ids": True}
    assert http.post("/v1/chat/completions", json=body).json()["prompt_token_ids"] == ids
    assert not {0, 1} & set(ids), "special tokens"
    assert text_of(http, ids).endswith("<|assistant|><|end|>3, 4")
    prompt = gateway_pb2.Prompt()
    prompt.chat.continue_final_message = True
    for message in messages:
        prompt.chat.messages.add(**message)
    own = tiny_quire.gateway.Tokenize(gateway_pb2.TokenizeRequest(prompt=prompt), timeout=CALL_SECONDS)
    assert list(own.token_ids) == ids


def test_roles_of_other_servers_are_rendered(http: httpx.Client) -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert tokenized(http, developer, USER) == tokenized(http, {**developer, "role": "system"}, USER)
