"""/tokenize and /detokenize, as in vLLM."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from quire.v1 import gateway_pb2
from services.gateway.text.tokenizer import Tokenizer
from tests.running_quire import RunningQuire
from tests.services.gateway.http.responses import rejection
from tests.services.gateway.http.scripted_server import ScriptedServer

TEXT = "Größe, 北京 🚀"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
TOOLS = [{"type": "function", "function": {"name": "now"}}]


@pytest.fixture(scope="module")
def backend(tiny_model: Callable[[str], Path]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(tiny_model("llama") / "tokenizer.json"))


def surrounding(folder: Path, before: list[int], after: list[int]) -> Tokenizer:
    """Return the tokenizer of a folder, changed to add special tokens around each text."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = " ".join([*(f"<{token}>" for token in before), "$A", *(f"<{token}>" for token in after)])
    special = [(f"<{token}>", token) for token in {*before, *after}]
    backend.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    return Tokenizer(backend, Tokenizer.load(folder).chat_template)


def tokenized(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/tokenize", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json().keys() == {"count", "max_model_len", "tokens", "token_strs"}
    assert answer.json()["count"] == len(answer.json()["tokens"])
    return dict(answer.json())


def text_of(http: httpx.Client, tokens: list[int]) -> str:
    return str(http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])


def test_a_prompt_is_tokenized_as_by_grpc_and_back(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    prompt = gateway_pb2.Prompt(text=TEXT)
    own = tiny_quire.gateway.Tokenize(gateway_pb2.TokenizeRequest(prompt=prompt), timeout=60)
    answer = tokenized(http, prompt=TEXT, model=None)
    assert answer["tokens"] == list(own.token_ids)
    assert (answer["max_model_len"], answer["token_strs"]) == (2048, None)
    assert text_of(http, answer["tokens"]) == TEXT


def test_token_strings_are_the_entries_of_the_vocabulary(http: httpx.Client, backend: tokenizers.Tokenizer) -> None:
    answer = tokenized(http, prompt=TEXT, return_token_strs=True)
    assert answer["token_strs"] == [backend.id_to_token(token) for token in answer["tokens"]]


def test_special_tokens_are_added_to_prompts_and_to_messages_on_request(tiny_model: Callable[[str], Path]) -> None:
    with closing(ScriptedServer(tiny_model("llama"))) as server:
        server.handler.own_tokenizer = surrounding(tiny_model("llama"), before=[5], after=[7, 7])
        inner = tokenized(server.client, prompt=TEXT, add_special_tokens=False)["tokens"]
        for options in ({}, {"add_special_tokens": True}):
            assert tokenized(server.client, prompt=TEXT, **options)["tokens"] == [5, *inner, 7, 7]
        for options in ({}, {"add_special_tokens": False}):
            assert tokenized(server.client, messages=CHAT, **options)["tokens"] == [1]
        assert tokenized(server.client, messages=CHAT, add_special_tokens=True)["tokens"] == [5, 1, 7, 7]


@pytest.mark.parametrize(
    ("options", "end"),
    [({}, "opened"), ({"add_generation_prompt": False}, "closed"), ({"add_generation_prompt": True}, "opened")],
)
def test_messages_are_tokenized_with_or_without_an_open_turn(
    http: httpx.Client, options: dict[str, Any], end: str
) -> None:
    text = text_of(http, tokenized(http, messages=CHAT, **options)["tokens"])
    closed = text_of(http, tokenized(http, messages=CHAT, add_generation_prompt=False)["tokens"])
    assert (text == closed) == (end == "closed")
    assert text.startswith(closed)


def test_messages_are_tokenized_as_a_chat_uses_them(http: httpx.Client) -> None:
    messages = [*CHAT, {"role": "assistant", "content": "Because"}]
    for options in ({"tools": TOOLS}, {"continue_final_message": True, "add_generation_prompt": False}):
        answer = tokenized(http, messages=messages, **options)
        chat = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1, **options}).json()
        assert answer["count"] == chat["usage"]["prompt_tokens"]
    assert text_of(http, answer["tokens"]).endswith("Because")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": CHAT}, "prompt"),
        ({"prompt": "x", "tools": TOOLS}, "tools"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ({"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ],
)
def test_a_rejection_names_the_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/tokenize", json=body)
    assert (rejection(answer)[0], answer.json()["error"]["param"]) == (400, param)


def test_an_unknown_token_is_rejected(http: httpx.Client) -> None:
    answer = http.post("/detokenize", json={"tokens": [1, 99999]})
    assert (rejection(answer)[0], answer.json()["error"]["param"]) == (400, "tokens[1]")
