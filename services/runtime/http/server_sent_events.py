"""A response of server-sent events that ends when its client disconnects."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.runtime.http.disconnect import ClientDisconnected, while_connected

Events = AsyncGenerator[bytes, None]


class ServerSentEvents(Response):
    """Sends events as bytes, without empty ones.

    The caller has awaited `first`, so that errors before it have their own status.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, rest: Events, headers: Mapping[str, str]) -> None:
        self.status_code = HTTPStatus.OK
        self.background = None
        self.init_headers({"x-accel-buffering": "no", **headers})
        self._first = first
        self._rest = rest

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        """Send all events, or stop when the client disconnects."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with suppress(ClientDisconnected):
            await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._rest) as rest:
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for one in rest:
                if one:
                    await send({"type": "http.response.body", "body": one, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
