"""Serves a process's metrics to Prometheus over HTTP, on their own port, and its readiness to health checks."""

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
from services.runtime.service import Readiness

_METRICS_PATH, _READY_PATH, _LIVE_PATH = "/metrics", "/ready", "/live"
_NOT_FOUND = f"there are only {_METRICS_PATH}, {_READY_PATH} and {_LIVE_PATH} here\n"
_ANSWER_SECONDS = 5.0
_LIMITS = HttpLimits(connections=8, read_seconds=5.0, write_seconds=5.0)
_CLOSE = {"connection": "close"}  # so that idle scrapers do not occupy all connections

log = logging.getLogger("quire")


@asynccontextmanager
async def metrics_server(exposition: Exposition, readiness: Readiness) -> AsyncIterator[str]:
    """Serve metrics and readiness over HTTP, and yield the metrics' URL. Raises AddressUnavailable.

    Collectors run on the current event loop, so the state that they read has one owner.
    """
    server = HttpServer(_MetricsApp(MetricsPage(exposition), readiness), _LIMITS)
    host = exposition.address.rpartition(":")[0]
    port = (await server.start(exposition.address, "show metrics")).rpartition(":")[2]
    try:
        yield f"http://{host}:{port}{_METRICS_PATH}"
    finally:
        await server.stop()


class _MetricsApp:
    """Answers the paths of the metrics and of health checks."""

    def __init__(self, page: MetricsPage, readiness: Readiness) -> None:
        self._page = page
        self._readiness = readiness

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (await self._response(scope["method"], scope["path"]))(scope, receive, send)

    async def _response(self, method: str, path: str) -> Response:
        if path not in (_METRICS_PATH, _READY_PATH, _LIVE_PATH):
            return Response(_NOT_FOUND, HTTPStatus.NOT_FOUND, _CLOSE)
        if method not in ("GET", "HEAD"):
            return Response(status_code=HTTPStatus.METHOD_NOT_ALLOWED, headers={"allow": "GET, HEAD", **_CLOSE})
        if path == _LIVE_PATH:  # answered by the event loop of the service
            return Response("live\n", headers=_CLOSE)
        if path == _READY_PATH:  # without the metrics, which take milliseconds to write
            return self._ready()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                return Response(await self._page.text(), headers=_CLOSE, media_type=CONTENT_TYPE_PLAIN_0_0_4)
        except TimeoutError:
            return Response("the event loop does not answer\n", HTTPStatus.SERVICE_UNAVAILABLE, _CLOSE)
        except Exception:  # of a collector; the HTTP server would not log it
            log.exception("the metrics could not be read")
            return Response(status_code=HTTPStatus.INTERNAL_SERVER_ERROR, headers=_CLOSE)

    def _ready(self) -> Response:
        ready = self._readiness.ready
        lines = ["ready" if ready else "not ready", *(" ".join(note.split()) for note in self._readiness.notes)]
        status = HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE
        return Response("".join(f"{line}\n" for line in lines), status, _CLOSE)
