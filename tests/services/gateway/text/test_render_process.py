"""A template has limits of time, memory and output."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.gateway.text.chat_renderer import ChatRenderer
from services.gateway.text.chat_template import ChatTemplate, ChatTemplateLimit, Conversation
from services.gateway.text.rendering.render_process import RenderProcess

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
    os.waitid(os.P_PID, pid(process), os.WEXITED | os.WNOWAIT)
    assert process.render("default", {}).reason == "the process that renders it has ended with the status -9"
    assert process.render("default", {"text": "again"}).text == "again"


def test_a_process_goes_on_after_a_limit(process: RenderProcess) -> None:
    process.render("default", {})
    first = pid(process)
    for source in (ENDLESS, "{{ 'a' * 10 ** 10 }}"):
        assert process.render(source, {}, seconds=0.05).limit
        assert process.render("default", {"text": "still here"}).text == "still here"
    assert pid(process) == first


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
