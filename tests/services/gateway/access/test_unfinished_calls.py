"""Calls that outlast the grace time of a gateway that stops."""

import asyncio

import pytest

from services.gateway.access.unfinished_calls import UnfinishedCalls
from services.runtime.errors import Unavailable


async def wait_in(calls: UnfinishedCalls) -> None:
    with calls.watched():
        await asyncio.Event().wait()


def test_a_call_that_is_left_ends_as_unavailable_which_clients_retry() -> None:
    async def run() -> None:
        calls = UnfinishedCalls()
        tasks = [asyncio.create_task(wait_in(calls)) for _ in range(2)]
        await asyncio.sleep(0)
        calls.end()
        for task in tasks:
            with pytest.raises(Unavailable, match="stopped before the request ended"):
                await task

    asyncio.run(run())


def test_a_call_cancelled_by_its_client_stays_cancelled() -> None:
    async def run() -> None:
        task = asyncio.create_task(wait_in(UnfinishedCalls()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_a_call_that_has_ended_is_not_cancelled() -> None:
    async def run() -> None:
        calls = UnfinishedCalls()
        with calls.watched():
            pass
        calls.end()
        await asyncio.sleep(0)

    asyncio.run(run())


def test_a_call_is_waited_for_until_its_last_message_is_written() -> None:
    async def run() -> None:
        calls, written = UnfinishedCalls(), asyncio.Event()

        async def write() -> None:
            with calls.watched():
                await written.wait()

        call = asyncio.create_task(write())
        await asyncio.sleep(0)
        waiting = asyncio.create_task(calls.finished())
        await asyncio.sleep(0)
        assert not waiting.done()
        written.set()
        await waiting
        assert call.done()

    asyncio.run(run())
