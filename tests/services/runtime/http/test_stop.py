"""The end of an HTTP server while requests are in flight."""

import asyncio

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from services.runtime.http.connection import HttpLimits
from services.runtime.http.server import HttpServer
from tests.running_quire import CALL_SECONDS

pytestmark = pytest.mark.anyio
LIMITS = HttpLimits(connections=8, read_seconds=CALL_SECONDS, write_seconds=CALL_SECONDS)


class Endless:
    """An application whose requests never end; at /stream their responses have begun."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
        self.entered.set()
        await asyncio.Event().wait()


async def stopped(path: str) -> asyncio.Task[httpx.Response]:
    """Send a request, and stop the server while it runs."""
    app = Endless()
    server = HttpServer(app, LIMITS)
    url = await server.start("127.0.0.1:0")
    async with httpx.AsyncClient(base_url=url, timeout=CALL_SECONDS) as client:
        request = asyncio.create_task(client.get(path))
        await asyncio.wait_for(app.entered.wait(), CALL_SECONDS)
        await server.stop()
        await asyncio.wait([request])
    return request


async def test_a_request_without_a_response_gets_503_when_the_server_stops() -> None:
    answer = (await stopped("/")).result()
    assert (answer.status_code, answer.headers["connection"], answer.headers["retry-after"]) == (503, "close", "1")
    error = {"message": "the service is stopping", "type": "service_unavailable_error", "param": None}
    assert answer.json()["error"] == error | {"code": "unavailable"}


async def test_a_response_that_has_begun_is_cut_off_when_the_server_stops() -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        (await stopped("/stream")).result()
