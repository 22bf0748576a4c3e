"""A folder with the tokenizer of the simulated model."""

from pathlib import Path

import pytest

from simulation.tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(made)
    return made
