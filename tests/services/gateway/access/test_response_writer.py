import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from services.gateway.access.response_writer import ResponseWriter


class Client:
    """Takes messages one at a time, when `take` is called; `left` are those that it took."""

    def __init__(self) -> None:
        self.left: list[str] = []
        self._taking: asyncio.Future[None] | None = None

    async def write(self, message: str) -> None:
        assert self._taking is None, "one write at a time"
        self._taking = asyncio.get_running_loop().create_future()
        try:
            await self._taking
            self.left.append(message)
        finally:
            self._taking = None

    def take(self, error: Exception | None = None) -> None:
        assert self._taking is not None, "a message is on its way"
        if error is None:
            self._taking.set_result(None)
        else:
            self._taking.set_exception(error)

    @property
    def is_written_to(self) -> bool:
        return self._taking is not None


def run(work: Callable[[ResponseWriter[str], Client], Coroutine[Any, Any, None]]) -> Client:
    async def with_first() -> Client:
        client = Client()
        writer = ResponseWriter(client.write)
        assert not writer.ready, "the first write sends the metadata"
        first = asyncio.create_task(writer.write("first"))
        await asyncio.sleep(0)
        assert not first.done(), "the first write is waited for"
        client.take()
        await first
        await work(writer, client)
        return client

    return asyncio.run(with_first())


def test_a_write_goes_on_while_its_caller_does_something_else() -> None:
    async def work(writer: ResponseWriter[str], client: Client) -> None:
        await writer.write("second")
        assert client.is_written_to
        assert not writer.ready
        third = asyncio.create_task(writer.write("third"))
        await asyncio.sleep(0)
        assert not third.done(), "the second has not left"
        client.take()
        await third
        client.take()
        await writer.finish()

    assert run(work).left == ["first", "second", "third"]


def test_messages_can_begin_without_waiting_once_the_one_before_has_left() -> None:
    async def work(writer: ResponseWriter[str], client: Client) -> None:
        for message in ("second", "third"):
            assert writer.ready
            writer.begin(message)
            assert not writer.ready
            client.take()
        assert writer.ready
        await writer.finish()

    assert run(work).left == ["first", "second", "third"]


def test_a_failed_write_is_raised_to_who_waits_for_it() -> None:
    async def work(writer: ResponseWriter[str], client: Client) -> None:
        writer.begin("second")
        client.take(ConnectionError("the client is gone"))
        assert not writer.ready
        with pytest.raises(ConnectionError, match="the client is gone"):
            await writer.write("third")

    assert run(work).left == ["first"]


def test_a_write_that_cannot_begin_is_raised_to_who_waits_for_it() -> None:
    async def fails(message: str) -> None:
        raise ConnectionError(f"no {message}")

    async def work() -> None:
        writer = ResponseWriter(fails)
        with pytest.raises(ConnectionError, match="no first"):
            await writer.write("first")
        assert not writer.ready
        with pytest.raises(ConnectionError, match="no first"):
            await writer.finish()

    asyncio.run(work())


def test_writes_that_need_no_waiting_are_ready_at_once() -> None:
    written: list[str] = []

    async def write(message: str) -> None:
        written.append(message)

    async def work() -> None:
        writer = ResponseWriter(write)
        await writer.write("first")
        assert writer.ready
        writer.begin("second")
        assert writer.ready
        await writer.finish()

    asyncio.run(work())
    assert written == ["first", "second"]


def test_who_waits_for_a_blocked_write_can_be_cancelled() -> None:
    async def work(writer: ResponseWriter[str], client: Client) -> None:
        writer.begin("second")
        third = asyncio.create_task(writer.write("third"))
        await asyncio.sleep(0)
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        writer.close()
        assert not client.is_written_to

    assert run(work).left == ["first"]


@pytest.mark.parametrize("error", [None, ConnectionError("the client is gone")])
def test_a_closed_writer_leaves_no_error_that_nobody_retrieves(error: Exception | None) -> None:
    reported: list[dict[str, Any]] = []

    async def work(writer: ResponseWriter[str], client: Client) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        writer.begin("second")
        written = writer._written
        if error is not None:
            client.take(error)
        writer.close()
        assert written is not None
        assert written.cancelled() == (error is None), "gRPC sets no result of a cancelled future"
        assert not client.is_written_to

    run(work)
    gc.collect()
    assert not reported
