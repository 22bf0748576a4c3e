"""Serves a process's metrics to Prometheus over HTTP, on their own port."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.runtime.http.connection import HttpLimits
from services.runtime.http.server import HttpServer
from services.runtime.metrics.page import Exposition, MetricsPage

_ANSWER_SECONDS = 5.0
_LIMITS = HttpLimits(connections=8, read_seconds=5.0, write_seconds=5.0)
_CLOSE = {"connection": "close"}  # so that idle scrapers do not occupy all connections

log = logging.getLogger("quire")


@asynccontextmanager
async def metrics_server(exposition: Exposition) -> AsyncIterator[str]:
    """Serve metrics over HTTP, and yield the URL. Raises AddressUnavailable.

    Collectors run on the current event loop, so the state that they read has one owner.
    """
    server = HttpServer(_MetricsApp(MetricsPage(exposition)), _LIMITS)
    host = exposition.address.rpartition(":")[0]
    port = (await server.start(exposition.address, "show metrics")).rpartition(":")[2]
    try:
        yield f"http://{host}:{port}/metrics"
    finally:
        await server.stop()


class _MetricsApp:
    """Answers every path with the metrics."""

    def __init__(self, page: MetricsPage) -> None:
        self._page = page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._response(scope["method"]))(scope, receive, send)

    async def _response(self, method: str) -> Response:
        if method not in ("GET", "HEAD"):
            return Response(status_code=HTTPStatus.METHOD_NOT_ALLOWED, headers={"allow": "GET, HEAD", **_CLOSE})
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return Response(await self._page.text(), headers=_CLOSE, media_type=CONTENT_TYPE_PLAIN_0_0_4)
        except TimeoutError:
            return Response("the event loop does not answer\n", HTTPStatus.SERVICE_UNAVAILABLE, _CLOSE)
        except Exception:  # of a collector; the HTTP server would not log it
            log.exception("the metrics could not be read")
            return Response(status_code=HTTPStatus.INTERNAL_SERVER_ERROR, headers=_CLOSE)
