"""A template has limits of time, memory and output, and one that reaches them holds up no other model."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2
from services.gateway.fleet.fleet import ServedModel
from services.gateway.text.chat_renderer import ChatRenderer
from services.gateway.text.chat_template import ChatTemplate, ChatTemplateLimit, Conversation
from services.gateway.text.rendering.render_process import RenderProcess
from services.gateway.text.tokenizer import Tokenizer
from services.gateway.tokenization import PromptTokenizer
from services.runtime.errors import InvalidField
from tests.services.gateway.text.test_detokenizer import byte_level

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
NESTED = "{% set n = namespace(x=[]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"
TIME, MEMORY = r"takes more than \d+ seconds", "needs more than 256 MiB of memory"
REASONS = {
    ENDLESS: TIME,
    NESTED + "{{ n.x == [[n.x]] }}{{ n.x | tojson }}": f"{TIME}|{MEMORY}",
    "{{ 10 ** (10 ** 10) }}": f"{TIME}|{MEMORY}",
    "{{ 'a' * 10 ** 10 }}": MEMORY,
    "{{ 'a' | center(10 ** 10) }}": MEMORY,
    "{{ '%10000000000d' % 1 }}": MEMORY,
    DOUBLED: MEMORY,
    "{% for i in range(99999) %}{{ 'abcd' * 1000 }}{% endfor %}": "writes more than 16,777,216 characters",
}
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def process() -> Iterator[RenderProcess]:
    one = RenderProcess({"default": "{{ text }}", **{source: source for source in REASONS}})
    yield one
    one.close()


def pid(process: RenderProcess) -> int:
    return process._running[0].process.pid


@pytest.mark.parametrize("source", REASONS)
def test_a_template_ends_at_a_limit_and_others_are_rendered_after_it(process: RenderProcess, source: str) -> None:
    answer = process.render(source, {})
    assert answer.text is None
    assert answer.limit
    assert re.search(REASONS[source], answer.reason)
    assert process.render("default", {"text": "still here"}).text == "still here"


def test_a_process_that_was_killed_is_started_again(process: RenderProcess) -> None:
    assert process.render("default", {"text": "é\ud83d"}).text == "é\ud83d"
    os.kill(pid(process), signal.SIGKILL)
    assert process.render("default", {}).reason == "the process that renders it has ended with the status -9"
    assert process.render("default", {"text": "again"}).text == "again"


def test_the_process_has_no_secrets_of_the_gateway(process: RenderProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    process.render("default", {})
    assert b"QUIRE" not in Path(f"/proc/{pid(process)}/environ").read_bytes()


def test_the_process_ends_with_its_template() -> None:
    process = RenderProcess({"default": "x"})
    process.render("default", {})
    child = pid(process)
    del process
    assert not Path(f"/proc/{child}").exists()


class CountedTemplate(ChatTemplate):
    renderings = 0

    def render(self, conversation: Conversation) -> str:
        self.renderings += 1
        return super().render(conversation)


def test_a_template_that_cannot_be_tried_is_not_tried_for_each_feature_and_role() -> None:
    template = CountedTemplate(ENDLESS, {})
    renderer = ChatRenderer(template)
    renderer.features.find()
    assert renderer.features.renders_role("user")
    assert template.renderings == 1
    with pytest.raises(ChatTemplateLimit, match=TIME):
        renderer.render(Conversation([USER]))
    assert template.renderings == 2


@pytest.mark.anyio
async def test_other_models_and_texts_do_not_wait_for_a_slow_template() -> None:
    slow, quick = (
        ServedModel(name, b"", Tokenizer(byte_level(), ChatTemplate(source, {})))
        for name, source in (("slow", ENDLESS), ("quick", "{{ messages[0].content }}"))
    )
    chat = gateway_pb2.Prompt()
    chat.chat.messages.add(role="user", content="Hi")
    prompts = PromptTokenizer()
    waiting = [asyncio.create_task(prompts.token_ids(slow, chat)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await prompts.token_ids(slow, gateway_pb2.Prompt(text="Hi"))
    assert await prompts.token_ids(quick, chat)
    assert not any(task.done() for task in waiting)
    waiting.pop().cancel()
    for task in waiting:
        with pytest.raises(InvalidField, match=f"prompt.chat: The chat template cannot render .*{TIME}"):
            await task
