"""Server-sent events as bytes, and a response of them that ends as soon as its client is gone."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.http.presence import ClientGone, while_connected

Events = AsyncGenerator[bytes, None]

DONE = b"data: [DONE]\n\n"

# As it is, unlike what `json.dumps` makes of text that is not ASCII; and without blanks.
to_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def event(value: Any) -> bytes:
    """Return one event with a JSON value."""
    return b"data: %b\n\n" % to_json(value).encode()


class EventStream(Response):
    """A response of events. `first` has been awaited by whoever makes this, so what is refused has its own status."""

    media_type = "text/event-stream"

    def __init__(
        self, first: bytes, rest: Events, fault: Callable[[Exception], Mapping[str, Any]], headers: Mapping[str, str]
    ) -> None:
        """`fault` tells what the client hears of an error in mid-stream."""
        self.status_code = HTTPStatus.OK
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._first = first
        self._rest = rest
        self._fault = fault

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or what a client that leaves waits for."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(ClientGone):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._rest) as rest:
            try:
                if self._first:
                    await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for one in rest:
                    if one:
                        await send({"type": "http.response.body", "body": one, "more_body": True})
            except Exception as error:  # the status is sent: all that is left is to say it here
                await send({"type": "http.response.body", "body": event(self._fault(error)), "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})


async def merged(streams: Sequence[Events]) -> Events:
    """Yield the events of all streams as they come. The first error ends all of them."""
    waiting = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                one, stream = task.result(), waiting.pop(task)
                if one is not None:
                    waiting[asyncio.ensure_future(anext(stream, None))] = stream
                    yield one
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
