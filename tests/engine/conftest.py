"""What the tests of the engine share."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on many threads, and the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def random_prompt() -> Callable[[int], list[int]]:
    """Makes prompts of the given length, the same ones in each run of a test."""
    source = random.Random(20240229)
    return lambda length: [source.randrange(1, 384) for _ in range(length)]
