"""The Responses API in front of a handler that plays the output of a thinking model."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.services.gateway.http.responses_api.playing import Player
from tests.services.gateway.http.scripted_server import ScriptedServer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "</{{ m.role }}>{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_model("llama"), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    with closing(ScriptedServer(folder)) as one:
        yield one


@pytest.fixture
def player(server: ScriptedServer) -> Iterator[Player]:
    yield Player(server)
    server.handler.script, server.handler.ends_at_limit = [], False
    server.handler.requests.clear()
