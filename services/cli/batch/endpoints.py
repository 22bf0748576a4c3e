"""Where the requests of a batch are answered: the HTTP API of a gateway in this process, or a server."""

import asyncio
import http.client
import json
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

Message = MutableMapping[str, Any]
Application = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

_REQUEST_ID = "x-request-id"
_JSON = "application/json"


class Unreachable(Exception):
    """The server cannot be reached, or it ended its connection; the message has the reason."""


class Response(NamedTuple):
    """A response. `retry_seconds`: the server asks for a retry after this time."""

    status: int
    request_id: str
    body: Any
    retry_seconds: float | None = None

    @classmethod
    def of(cls, status: int, headers: Mapping[str, str], content: bytes) -> "Response":
        """Read a response with its headers, whose names are in lower case."""
        try:
            body = json.loads(content)
        except ValueError:  # as from a proxy
            body = {"error": {"message": content.decode(errors="replace")[:1000], "code": None}}
        after = headers.get("retry-after", "")
        return cls(status, headers.get(_REQUEST_ID, ""), body, float(after) if after.isdecimal() else None)


class Endpoint(Protocol):
    """Answers requests."""

    async def post(self, url: str, body: bytes) -> Response:
        """Answer one request. Raises Unreachable."""


class InProcess:
    """The application of a gateway in this process."""

    def __init__(self, application: Application) -> None:
        self._application = application

    async def post(self, url: str, body: bytes) -> Response:
        """See Endpoint."""
        answer: list[Message] = []
        requests = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await asyncio.Event().wait()  # the client never disconnects
            raise AssertionError("nothing sets the event")

        async def send(message: Message) -> None:
            answer.append(message)

        await self._application(_scope(url), receive, send)
        headers = {name.decode().lower(): value.decode() for name, value in answer[0]["headers"]}
        content = b"".join(one.get("body", b"") for one in answer[1:])
        return Response.of(answer[0]["status"], headers, content)


def _scope(path: str) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", _JSON.encode())],
        "client": None,
        "server": None,
    }


class HttpServer:
    """A server of OpenAI's API. Each thread keeps a connection; there are as many as requests in flight."""

    def __init__(self, base_url: str, api_key: str, context: ssl.SSLContext | None, connections: int) -> None:
        """`base_url` may end with /v1, as for OpenAI's clients. Raises ValueError if it is no URL of HTTP."""
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"must be like http://host:port or http://host:port/v1, not {base_url!r}")
        self._host, self._port = parts.hostname, parts.port
        self._context = (context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": _JSON} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        self._threads = ThreadPoolExecutor(connections, "run-batch")
        self._local = threading.local()
        self._connections: set[http.client.HTTPConnection] = set()

    async def post(self, url: str, body: bytes) -> Response:
        """See Endpoint."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._post, url, body)

    def close(self) -> None:
        """Start no more requests, and end those in flight."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for connection in list(self._connections):
            if connection.sock:
                with suppress(OSError):  # closed already
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _post(self, url: str, body: bytes) -> Response:
        kept: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        connection = kept or self._open()
        try:
            return self._exchange(connection, url, body)
        except (OSError, http.client.HTTPException) as error:
            self._local.connection = None
            self._connections.discard(connection)
            if kept is None:
                raise Unreachable(f"{self._host}: {error or type(error).__name__}") from error
        return self._post(url, body)  # a server may close a connection that it keeps for long

    def _open(self) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPSConnection(self._host, self._port, context=self._context)
            if self._context
            else http.client.HTTPConnection(self._host, self._port)
        )
        self._connections.add(connection)
        return connection

    def _exchange(self, connection: http.client.HTTPConnection, url: str, body: bytes) -> Response:
        connection.request("POST", f"{self._prefix}{url}", body, self._headers)
        response = connection.getresponse()
        content = response.read()
        self._local.connection = connection
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Response.of(response.status, headers, content)
