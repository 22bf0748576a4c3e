"""The HTTP server inside the gateway's process, on its event loop."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from services.gateway.http.connection import REFUSED_WITH, Bounds, Connection
from services.gateway.observer import GatewayObserver
from services.service import Readiness
from services.transport import AddressUnavailable

_UNKNOWN_ROUTE = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_CLIENT_CLOSED_REQUEST = 499
_LAST_SECONDS = 1.0
# Longer than clients and load balancers keep a connection: it is they who close it, so no request meets a closed one.
_KEEP_ALIVE_SECONDS = 75
# What the kernel keeps for a client that does not read; it would be megabytes, and nobody would notice for long.
_UNREAD_BYTES = 64 * 1024


class HttpServer:
    """Serves an application."""

    def __init__(
        self,
        app: ASGIApp,
        bounds: Bounds,
        context: ssl.SSLContext | None = None,
        refused: Callable[[int], None] = lambda _: None,
    ) -> None:
        """With a context, connections are encrypted by it.

        `refused` hears the status of what was answered without the application having seen it.
        """
        self._bounds = bounds
        self._refused = refused
        self._context = context
        # It logs what clients do wrong; what goes wrong here is logged by the application.
        self._config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, address: str) -> str:
        """Listen at host:port, and return the URL. Raises AddressUnavailable."""
        listener = _listener(address)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._bounds, self._config, self._state, self._refused),
            sock=listener,
            ssl=self._context,
            ssl_handshake_timeout=self._bounds.read_seconds if self._context else None,
        )
        host, port = listener.getsockname()[:2]
        return f"{'https' if self._context else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    async def answered(self) -> None:
        """Return when no request is under way."""
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)

    async def stop(self) -> None:
        """Close everything; what is still under way is cancelled."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        for task in self._state.tasks:
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_LAST_SECONDS)
        for connection in list(self._state.connections):
            connection.transport.close()


class Observed:
    """An application around another: what every answer has, and who hears of it."""

    def __init__(self, app: ASGIApp, readiness: Readiness, observer: GatewayObserver) -> None:
        self._app = app
        self._readiness = readiness
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        status: int | None = None

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self._headers()]
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            route: Any = scope.get("route")
            method = scope["method"] if scope["method"] in _METHODS else _UNKNOWN_ROUTE
            # What was refused below gets no other answer, whatever the application makes of a client that is gone.
            status = scope["state"].get(REFUSED_WITH) or status or _CLIENT_CLOSED_REQUEST
            self._observer.http_request(getattr(route, "path", _UNKNOWN_ROUTE), method, status)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        date = (b"date", formatdate(usegmt=True).encode())
        # A client that comes again should come to another gateway.
        return [date, (b"connection", b"close")] if self._readiness.retired else [date]


def count_refusal(observer: GatewayObserver, status: int) -> None:
    """Tell of an answer to what the application never saw."""
    observer.http_request(_UNKNOWN_ROUTE, _UNKNOWN_ROUTE, status)


def _listener(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(place[:2], family=family, backlog=1024)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)  # connections inherit it
        return listener
    except (ValueError, OverflowError) as error:
        raise AddressUnavailable(f"cannot listen for HTTP on {address}: it is not host:port") from error
    except OSError as error:
        raise AddressUnavailable(f"cannot listen for HTTP on {address}: {error.strerror or error}") from error
