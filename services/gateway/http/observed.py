"""What every answer of the HTTP front has, and the count of answers."""

from email.utils import formatdate
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.observe.observer import GatewayObserver
from services.runtime.http.connection import REFUSED_WITH
from services.runtime.service import Readiness

_UNKNOWN_ROUTE = "other"
_METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_CLIENT_CLOSED_REQUEST = 499


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
            status = scope["state"].get(REFUSED_WITH) or status or _CLIENT_CLOSED_REQUEST
            self._observer.http_request(getattr(route, "path", _UNKNOWN_ROUTE), method, status)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        date = (b"date", formatdate(usegmt=True).encode())
        # A client that comes again should come to another gateway.
        return [date, (b"connection", b"close")] if self._readiness.retired else [date]


def count_refusal(observer: GatewayObserver, status: int) -> None:
    """Count an answer to what the application never received."""
    observer.http_request(_UNKNOWN_ROUTE, _UNKNOWN_ROUTE, status)
