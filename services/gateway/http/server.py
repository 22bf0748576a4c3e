"""The HTTP server: what every answer of it has, and the count of answers."""

import ssl
from email.utils import formatdate
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.callers import ANONYMOUS
from services.gateway.http.app import make_app
from services.gateway.http.json_request import Authenticate
from services.gateway.observe.observer import GatewayObserver
from services.gateway.request_handler import RequestHandler
from services.gateway.settings import GatewaySettings
from services.runtime.http.connection import REJECTED_STATUS, HttpLimits
from services.runtime.http.server import HttpServer
from services.runtime.service import Readiness

_UNKNOWN_ROUTE = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_CLIENT_CLOSED_REQUEST = 499


def http_server(
    handler: RequestHandler,
    settings: GatewaySettings,
    readiness: Readiness,
    observer: GatewayObserver,
    authenticate: Authenticate = lambda _: ANONYMOUS,
    context: ssl.SSLContext | None = None,
) -> HttpServer:
    """Make the server of a gateway; with a context, its connections are encrypted."""
    app = ObservedApp(make_app(handler, readiness, authenticate), readiness, observer)
    limits = HttpLimits(settings.http_connections, settings.http_read_seconds, settings.http_write_seconds)
    return HttpServer(app, limits, context, lambda status: count_refusal(observer, status))


class ObservedApp:
    """An application around another: adds what every answer has, and has answers observed."""

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
            status = scope["state"].get(REJECTED_STATUS) or status or _CLIENT_CLOSED_REQUEST
            self._observer.on_http_request(getattr(route, "path", _UNKNOWN_ROUTE), method, status)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        date = (b"date", formatdate(usegmt=True).encode())
        # A client that comes again should come to another gateway.
        return [date, (b"connection", b"close")] if self._readiness.retired else [date]


def count_refusal(observer: GatewayObserver, status: int) -> None:
    """Count an answer to what the application never received."""
    observer.on_http_request(_UNKNOWN_ROUTE, _UNKNOWN_ROUTE, status)
