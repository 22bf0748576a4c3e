"""Shows a process's metrics to Prometheus, over HTTP on a port of their own."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from services.runtime.metrics.page import Exposition, MetricsPage
from services.runtime.transport import AddressUnavailable

_ANSWER_SECONDS = 5.0
_READ_SECONDS = 5.0
_MOST_CONNECTIONS = 8
_BUSY = b"HTTP/1.0 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"

_Environ = dict[str, Any]
_StartResponse = Callable[[str, list[tuple[str, str]]], object]


@asynccontextmanager
async def metrics_server(exposition: Exposition) -> AsyncIterator[str]:
    """Serve metrics over HTTP, and give the URL. Raises AddressUnavailable.

    Requests are read on threads of their own, eight at most, but the registry is read and written down on the running
    event loop: what its collectors look at has one owner.
    """
    host, _, port = exposition.address.rpartition(":")
    try:
        server = _Server(host.strip("[]"), int(port), MetricsPage(exposition))
    except (ValueError, OverflowError) as error:
        raise AddressUnavailable(f"cannot show metrics on {exposition.address}: it is not host:port") from error
    except OSError as error:
        raise AddressUnavailable(f"cannot show metrics on {exposition.address}: {error.strerror}") from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}/metrics"
    finally:
        with suppress(OSError):  # Linux wakes the thread by it; elsewhere that looks every half second whether to end
            server.socket.shutdown(socket.SHUT_RDWR)
        # On a thread, because the request that it waits for may itself be waiting for the event loop.
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()


class _Handler(WSGIRequestHandler):
    timeout = _READ_SECONDS
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, as long as these are few."""

    daemon_threads = True

    def __init__(self, host: str, port: int, page: MetricsPage) -> None:
        self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        self._places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._page = page
        self._loop = asyncio.get_running_loop()
        super().__init__((host, port), _Handler)
        self.set_app(self._answer)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection, unless there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.sendall(_BUSY)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer what comes over a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of clients that go away, or send nothing."""

    def _answer(self, environ: _Environ, start_response: _StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response(_status(HTTPStatus.METHOD_NOT_ALLOWED), [("allow", "GET, HEAD")])
            return [b""]
        try:
            text = asyncio.run_coroutine_threadsafe(self._page.text(), self._loop).result(_ANSWER_SECONDS)
        except TimeoutError:
            start_response(_status(HTTPStatus.SERVICE_UNAVAILABLE), [])
            return [b"the event loop does not answer\n"]
        start_response(_status(HTTPStatus.OK), [("content-type", CONTENT_TYPE_PLAIN_0_0_4)])
        return [text]


def _status(status: HTTPStatus) -> str:
    return f"{status.value} {status.phrase}"
