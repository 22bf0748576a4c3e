"""The HTTP server, with the headers of every response and the observation of requests."""

import ssl
from collections.abc import Sequence
from email.utils import formatdate
from typing import Any

from fastapi import APIRouter
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.access.callers import ANONYMOUS
from services.gateway.access.origins import origins_of
from services.gateway.administration import FleetAdministration
from services.gateway.fleet.prefix_lookup import PrefixLookup
from services.gateway.http.app import make_app
from services.gateway.http.chat_page.block_watch import BlockWatches
from services.gateway.http.chat_page.routes import chat_routers
from services.gateway.http.json_request import Authenticate
from services.gateway.observe.observer import GatewayObserver
from services.gateway.request_handler import RequestHandler
from services.gateway.settings import CHAT, GatewaySettings
from services.runtime.exposure import is_local
from services.runtime.http.connection import REJECTED_STATUS, HttpLimits
from services.runtime.http.server import HttpServer
from services.runtime.service import Readiness

_UNKNOWN_ROUTE = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_CLIENT_CLOSED_REQUEST = 499
# What a page may read of a response besides its body.
_EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry")


def http_server(
    handler: RequestHandler,
    administration: FleetAdministration,
    settings: GatewaySettings,
    readiness: Readiness,
    observer: GatewayObserver,
    authenticate: Authenticate = lambda _: ANONYMOUS,
    context: ssl.SSLContext | None = None,
    managers: PrefixLookup | None = None,
) -> HttpServer:
    """Build the HTTP server of a gateway. With a context it uses TLS. The chat page asks `managers` for blocks."""
    pages: list[APIRouter] = []
    if settings.pages == CHAT:
        pages = chat_routers(BlockWatches(handler, managers), local=is_local(settings.http_listen))
    app = make_app(handler, administration, readiness, authenticate, pages)
    observed = ObservedApp(with_origins(app, origins_of(settings.allowed_origins)), readiness, observer)
    limits = HttpLimits(
        settings.http_connections,
        settings.http_read_seconds,
        settings.http_write_seconds,
        settings.max_connection_age_seconds,
        settings.http_idle_seconds,
    )
    return HttpServer(observed, limits, context, lambda status: count_rejection(observer, status))


def with_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return the application with CORS for the pages of these origins.

    Preflights need no API key. Pages send keys in headers, so that browsers send no cookies.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=_EXPOSED_HEADERS,
    )


class ObservedApp:
    """Wraps an application: adds headers to every response and reports every request to the observer."""

    def __init__(self, app: ASGIApp, readiness: Readiness, observer: GatewayObserver) -> None:
        self._app = app
        self._readiness = readiness
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        status: int | None = None

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self._headers()]
            await send(message)

        try:
            await self._app(scope, receive, send_with_headers)
        finally:
            route: Any = scope.get("route")
            method = scope["method"] if scope["method"] in _METHODS else _UNKNOWN_ROUTE
            # A status sent by the connection itself counts, because the application sees only a disconnected client.
            status = scope["state"].get(REJECTED_STATUS) or status or _CLIENT_CLOSED_REQUEST
            self._observer.on_http_request(getattr(route, "path", _UNKNOWN_ROUTE), method, status)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        date = (b"date", formatdate(usegmt=True).encode())
        # While draining, clients should reconnect to another gateway.
        return [date, (b"connection", b"close")] if self._readiness.retired else [date]


def count_rejection(observer: GatewayObserver, status: int) -> None:
    """Report a request that was rejected before it reached the application."""
    observer.on_http_request(_UNKNOWN_ROUTE, _UNKNOWN_ROUTE, status)
