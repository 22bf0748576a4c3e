"""Work for a client that may leave before it is done."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work, and cancel it as soon as the client is gone. The body must have been read. Raises ClientGone."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
