"""Chats with a model in a GGUF file over HTTP: where an answer ends, and calls that its template cannot render."""

from collections.abc import Iterator
from typing import Any

import gguf
import httpx
import pytest

from tests.gguf_models import MIXED, write_llama
from tests.running_quire import RunningQuire, start_quire

END_OF_TURN, END_OF_MESSAGE, NO_END, BY_NAME = 300, 301, 302, 2  # <|im_end|> is known to end a turn
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %}"
    "{{ call.function.name }} {% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}"
    "{% endfor %}{% endfor %}\n{% endfor %}"
)
QUESTION = {"role": "user", "content": "ab"}


def describe(writer: gguf.GGUFWriter) -> None:
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(END_OF_TURN)
    writer.add_eom_token_id(END_OF_MESSAGE)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningQuire]:
    path = write_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf", MIXED, change=describe)
    one = start_quire("--model", str(path), "--device-blocks", "32", "--http-listen", "127.0.0.1:0")
    yield one
    one.close()


def chat(served: RunningQuire, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, **fields}
    return httpx.post(f"{served.http_url}/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("token", [END_OF_TURN, END_OF_MESSAGE, BY_NAME, 0])
def test_a_chat_ends_at_the_ends_of_turns_and_messages_that_the_file_names(served: RunningQuire, token: int) -> None:
    choice = chat(served, [QUESTION], logit_bias={token: 100}).raise_for_status().json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")


def test_a_chat_does_not_end_at_another_token(served: RunningQuire) -> None:
    choice = chat(served, [QUESTION], logit_bias={NO_END: 100}).raise_for_status().json()["choices"][0]
    assert choice["finish_reason"] == "length"


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "1", "content": "5"}
    return [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]


def test_arguments_that_the_template_cannot_render_are_refused_by_their_call(served: RunningQuire) -> None:
    assert chat(served, called('{"a": 1}')).status_code == 200
    for arguments in ("[1]", "not json"):
        refused = chat(served, called(arguments))
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"
