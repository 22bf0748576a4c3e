"""Fixtures of the block managers under test."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.block_managers import CoreManager, LoopThread, Manager, WireManager


@pytest.fixture(scope="session")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture
def make_manager(loop: LoopThread) -> Iterator[Callable[[str], Manager]]:
    """Return a factory of managers of a kind: `in process` or `over gRPC`."""
    made: list[Manager] = []
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:  # short enough for a socket's address

        def make(kind: str) -> Manager:
            if kind == "in process":
                made.append(CoreManager())
            else:
                made.append(WireManager(loop, Path(folder) / f"{len(made)}.sock"))
            return made[-1]

        yield make
        for manager in made:
            manager.close()


@pytest.fixture(params=["in process", "over gRPC"])
def manager(request: pytest.FixtureRequest, make_manager: Callable[[str], Manager]) -> Manager:
    return make_manager(request.param)
