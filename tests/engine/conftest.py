"""Fixtures of the engine's tests."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.families import Checkpoint, Family, write_checkpoint


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are slower on many threads, and other tests need the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Seed torch, so that random numbers do not depend on the order of tests."""
    torch.manual_seed(20240229)


@pytest.fixture
def random_prompt() -> Callable[[int], list[int]]:
    source = random.Random(20240229)
    return lambda length: [source.randrange(1, 384) for _ in range(length)]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folders: dict[str, Path] = {}

    def make(family: Family) -> Path:
        if repr(family) not in folders:
            folders[repr(family)] = tmp_path_factory.mktemp("families") / family.name
            write_checkpoint(family, folders[repr(family)])
        return folders[repr(family)]

    return make
