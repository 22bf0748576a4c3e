"""Cancels work when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientDisconnected(Exception):
    """The client closed its connection before the response was complete."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, and cancel it as soon as the client disconnects. The body must have been read.

    Raises ClientDisconnected.
    """
    working = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        disconnect.cancel()
        await asyncio.gather(working, disconnect, return_exceptions=True)
        # An error of the task has this frame in its traceback: a cycle, which would keep the request until a full
        # garbage collection.
        del working


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
