"""The HTTP server inside a service's process, on its event loop."""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from services.runtime.addresses import MAX_PORT, port_fault
from services.runtime.http.connection import HttpConnection, HttpLimits
from services.runtime.transport import AddressUnavailable

_LAST_SECONDS = 1.0
# Kernel buffer per connection. The default is megabytes, which would hide slow clients for long.
_UNREAD_BYTES = 64 * 1024


class HttpServer:
    """Serves an ASGI application."""

    def __init__(
        self,
        app: ASGIApp,
        limits: HttpLimits,
        context: ssl.SSLContext | None = None,
        on_rejected: Callable[[int], None] = lambda _: None,
    ) -> None:
        """With a context, connections are encrypted.

        `on_rejected` is called with the status of each response that the application never saw.
        """
        self._limits = limits
        self._on_rejected = on_rejected
        self._context = context
        # uvicorn logs faults of clients; the application logs its own.
        self._config = uvicorn.Config(
            app,
            http=HttpConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.CRITICAL,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=limits.idle_seconds,  # type: ignore[arg-type]
        )
        self._config.load()
        self._state = ServerState()
        self._server: asyncio.Server | None = None

    async def start(self, address: str, purpose: str = "listen for HTTP") -> str:
        """Listen on host:port, and return the URL. Raises AddressUnavailable, with `purpose` in the message."""
        listener = _listener(address, purpose)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: HttpConnection(self._limits, self._config, self._state, self._on_rejected),
            sock=listener,
            ssl=self._context,
            ssl_handshake_timeout=self._limits.read_seconds if self._context else None,
        )
        host, port = listener.getsockname()[:2]
        return f"{'https' if self._context else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"

    async def finish_requests(self) -> None:
        """Return when no request is in flight."""
        while self._state.tasks:
            await asyncio.wait(self._state.tasks)

    async def stop(self) -> None:
        """Close all connections, and cancel requests in flight; those without a response get a 503."""
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
            if isinstance(connection, HttpConnection):
                connection.end()
        for task in self._state.tasks:
            task.cancel()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_LAST_SECONDS)
        for connection in list(self._state.connections):
            connection.transport.close()


def _listener(address: str, purpose: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        if int(port) > MAX_PORT:
            raise OverflowError  # create_server would raise it too, and leave a socket open
        family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        listener = socket.create_server((place[0], int(port)), family=family, backlog=1024)
        # Connections inherit both options. asyncio sets TCP_NODELAY only on sockets made with IPPROTO_TCP; without it,
        # responses on kept-alive connections wait 40 ms for the client's acknowledgement.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNREAD_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OverflowError, ValueError, OSError) as error:
        raise AddressUnavailable(f"cannot {purpose} on {address}: {_listen_fault(error, port)}") from error


def _listen_fault(error: Exception, port: str) -> str:
    if isinstance(error, OverflowError):
        return port_fault(port)
    if isinstance(error, ValueError):
        return "the address must be host:port"
    if isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    # The system's reason only, because the text of create_server repeats the address.
    return os.strerror(getattr(error, "errno", None) or 0)
