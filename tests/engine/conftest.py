"""Fixtures of the engine's tests."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.families import Checkpoint, Family, write_checkpoint

# What runs in Triton's interpreter where there is no GPU, or compiles for one.
_GPU_FOLDERS = {"gpu", "triton_kernels"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the GPU's path, which `make gpu-path-check` runs."""
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and (
            "triton" in item.name or _GPU_FOLDERS.intersection(item.path.relative_to(here).parts)
        ):
            item.add_marker("gpu_path")


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
