import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.services.gateway.http.scripted_server import ScriptedServer
from tests.services.gateway.http.test_thoughts import TEMPLATE


@pytest.fixture(scope="session")
def thinking_model(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template has thoughts, calls and a switch for thoughts."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_model("llama"), folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


@pytest.fixture
def server(thinking_model: Path) -> Iterator[ScriptedServer]:
    with closing(ScriptedServer(thinking_model)) as one:
        yield one
