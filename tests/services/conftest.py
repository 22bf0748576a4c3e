"""Shared fixtures of the tests of services."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.running_quire import RunningQuire, RunningService, start_quire


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Tests marked `anyio` are coroutines on an event loop of asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def _late_events() -> Iterator[None]:
    """Drop events of a closed event loop that arrive on another one.

    gRPC has one poller for all event loops of a process. An operation of a server that a test has stopped may complete
    after its loop was closed; the poller then hands it over on the loop of the next test, which would fail.
    """
    call_soon = asyncio.BaseEventLoop.call_soon_threadsafe

    def call_soon_if_open(loop: asyncio.BaseEventLoop, *arguments: Any, **options: Any) -> asyncio.Handle | None:
        if loop.is_closed() and asyncio._get_running_loop() not in (None, loop):
            return None
        return call_soon(loop, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", call_soon_if_open)
        yield


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
