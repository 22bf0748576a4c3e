"""What the tests of the engine share."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.families import Checkpoint, Family, write_checkpoint


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on many threads, and the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """What a test draws does not depend on which others have drawn before it."""
    torch.manual_seed(20240229)


@pytest.fixture
def random_prompt() -> Callable[[int], list[int]]:
    """Makes prompts of the given length, the same ones in each run of a test."""
    source = random.Random(20240229)
    return lambda length: [source.randrange(1, 384) for _ in range(length)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Writes a random checkpoint of a family once."""
    folders: dict[str, Path] = {}

    def make(family: Family) -> Path:
        if repr(family) not in folders:
            folders[repr(family)] = tmp_path_factory.mktemp("families") / family.name
            write_checkpoint(family, folders[repr(family)])
        return folders[repr(family)]

    return make
