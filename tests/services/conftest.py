"""Shared fixtures of the tests of services."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.running_quire import RunningQuire, RunningService, start_quire


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` are coroutines on an event loop of asyncio."""
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    """A tiny Llama and 64 blocks of 16 tokens for the session. No requests remain after a test."""
    pool = ("--device-blocks", "64", "--max-sequences", "16")
    one = start_quire("--model", str(tiny_model("llama")), *pool, "--http-listen", "127.0.0.1:0")
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0


@pytest.fixture(scope="module")
def service() -> Iterator[Callable[..., RunningService]]:
    """Starts services by their own commands, and stops them at the end of the module."""
    running: list[RunningService] = []

    def start(label: str, *arguments: str) -> RunningService:
        running.append(RunningService(label, *arguments))
        return running[-1]

    yield start
    for one in reversed(running):
        one.close()
