import asyncio
import socket
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import grpc
import pytest

from services.runtime import transport
from services.runtime.transport import ServiceLoop, TimedSelector, is_grpc_reader


class PollerCompletionQueue:
    """Takes one byte for each call, as grpc.aio's class of this name does."""

    def __init__(self, reader: socket.socket) -> None:
        self._reader = reader
        self.calls = 0

    def handle(self) -> None:
        self._reader.recv(1)
        self.calls += 1


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        yield reader, writer


def run(count: int, pair: tuple[socket.socket, socket.socket], reader_class: type = PollerCompletionQueue) -> int:
    """Write bytes, run a loop until they are taken, and return the number of calls."""
    reader, writer = pair
    queue = reader_class(reader)

    async def work() -> None:
        asyncio.get_running_loop().add_reader(reader, partial(queue.handle))
        writer.send(b"1" * count)
        with suppress(BlockingIOError):  # all are taken
            while True:
                await asyncio.sleep(0)
                reader.recv(1, socket.MSG_PEEK)

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(work())
    return int(queue.calls)


@pytest.mark.parametrize("count", [1, 2, 100])
def test_the_loop_calls_grpcs_reader_once_for_all_bytes(count: int, pair: tuple[socket.socket, socket.socket]) -> None:
    assert run(count, pair) == 1


def test_other_readers_take_their_bytes_themselves(pair: tuple[socket.socket, socket.socket]) -> None:
    class OtherQueue(PollerCompletionQueue):
        pass

    assert run(5, pair, OtherQueue) == 5


def test_grpcs_reader_is_recognized() -> None:
    """Otherwise a newer grpc has another one, and the loop wakes up for each finished operation again."""
    seen = []

    class SpyingLoop(ServiceLoop):
        def add_reader(self, fd: object, callback: object, *args: object) -> None:
            seen.append(is_grpc_reader(callback))  # type: ignore[arg-type]
            super().add_reader(fd, callback, *args)  # type: ignore[arg-type]

    async def work() -> None:
        server = grpc.aio.server()
        await server.start()
        await server.stop(None)

    with asyncio.Runner(loop_factory=SpyingLoop) as runner:
        runner.run(work())
    assert True in seen


def test_the_selector_counts_the_seconds_in_which_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.5, 10.0, 10.25])
    selector = TimedSelector()
    monkeypatch.setattr("services.runtime.transport.time.monotonic", lambda: next(times))
    for _ in range(2):
        assert selector.select(0) == []
    monkeypatch.undo()
    selector.close()
    assert selector.waited_seconds == 2.75


def test_only_a_services_loop_measures_how_long_it_waits() -> None:
    async def measured() -> bool:
        return transport.waited_seconds() is not None

    assert not asyncio.run(measured())
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        assert runner.run(measured())
