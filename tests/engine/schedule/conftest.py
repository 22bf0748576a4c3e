from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def folder(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("llama")
