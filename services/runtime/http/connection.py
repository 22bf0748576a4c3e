"""An HTTP connection: uvicorn's protocol with additional limits."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_HEAD_BYTES = 32 * 1024
_MAX_HEADERS = 100
# Requests that a client may send before the previous one is answered.
_MAX_PIPELINED = 8
# Key in a request's state: the status of the response sent here while the application was working on it.
REJECTED_STATUS = "rejected_status"
# Body bytes discarded after the response: most clients read the response only after sending all, and lose it if the
# connection is closed before.
_MAX_UNREAD_BYTES = 1024 * 1024 * 1024
# For the rest of a late request.
_LAST_SECONDS = 1.0
# Excess connections that receive a 503; further ones are closed at once.
_MAX_REFUSED_CONNECTIONS = 64
# The beginning of a request whose method may be one that the parser does not know.
_METHOD = re.compile(rb"(?:\r?\n)*+([!#$%&'*+.^_`|~0-9A-Za-z-]++) \S++ HTTP/1\.[01]\r?\n")
_MAX_METHOD = 40
# uvicorn closes a connection after a response with it.
_CLOSE = (b"connection", b"close")


@dataclass(frozen=True)
class HttpLimits:
    """Maximum connections, and time limits of each.

    `read_seconds` limits the head of a request, and its body. `write_seconds` without progress close the connection of
    a slow client. After `age_seconds` the next response is the last one of its connection; 0: no limit.
    """

    connections: int
    read_seconds: float
    write_seconds: float
    age_seconds: float = 0.0


class _Deadline:
    """Calls an action after a time, unless stopped or restarted."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float, action: Callable[[], None]) -> None:
        self.stop()
        self._timer = self._loop.call_later(seconds, action)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def begun(self) -> bool:
        return self._timer is not None


class _HeadTooLarge(Exception):
    """The head of a request has too many bytes or headers."""


class _ResponseTransport:
    """The transport of a response, which closes only after the rest of the request has arrived."""

    def __init__(self, connection: "HttpConnection") -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Send bytes."""
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        """Return True if nothing more can be sent."""
        return self._connection.lingers or self._connection.transport.is_closing()

    def close(self) -> None:
        """Stop sending."""
        self._connection.close()


class HttpConnection(HttpToolsProtocol):
    """Closes stalled connections, and answers malformed requests in OpenAI's format.

    `on_rejected` is called with the status of each response that the application never saw.
    """

    def __init__(
        self, limits: HttpLimits, config: Config, state: ServerState, on_rejected: Callable[[int], None]
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._limits = limits
        self._on_rejected = on_rejected
        self._reading = _Deadline(self.loop)
        self._writing = _Deadline(self.loop)
        self._in_head = False
        self._unfinished = False  # a request has begun and is incomplete
        self._head_bytes = 0
        self._unread_bytes = 0
        self._made_at = self.loop.time()
        self.lingers = False  # the response is complete, and further input is discarded

    def close(self) -> None:
        """Stop sending, and close once the request is complete; it may have been answered before."""
        if self._unfinished:
            self._linger(self._limits.read_seconds)
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections", within=_LAST_SECONDS)
            if len(self.connections) > self._limits.connections + _MAX_REFUSED_CONNECTIONS:
                self.transport.close()
        else:
            self._restart_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._reading.stop()
        self._writing.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes."""
        if self.transport.is_closing():
            return
        if self.lingers:
            self._drop(len(data))
            return
        self._unset_keepalive_if_required()
        began_before = self._in_head
        try:
            self.parser.feed_data(data)
            if began_before and self._in_head:  # the parser reports a header only when it is complete
                self._count_head(len(data))
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # the following bytes are not HTTP/1.1
        except (_HeadTooLarge, httptools.HttpParserError) as error:
            if isinstance(error, _HeadTooLarge) or isinstance(error.__context__, _HeadTooLarge):
                message = f"the head of the request must have at most {_HEAD_BYTES} bytes and {_MAX_HEADERS} headers"
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)
            elif isinstance(error, httptools.HttpParserInvalidMethodError) and (method := _METHOD.match(data)):
                self._refuse(HTTPStatus.NOT_IMPLEMENTED, f"there is no method {method[1][:_MAX_METHOD].decode()}")
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, "not a valid HTTP/1.1 request")
        else:
            if not self._reading.begun and not self._unfinished and not self._answering:
                self._restart_read_timer()  # for example after blank lines

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = self._unfinished = True
        self._head_bytes = self._unread_bytes = 0
        self._restart_read_timer()

    def on_url(self, url: bytes) -> None:
        """Part of the path arrived."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header arrived."""
        self._count_head(len(name) + len(value))
        if len(self.headers) >= _MAX_HEADERS:
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete; the body has its own time limit, from its turn in the pipeline on."""
        self._in_head = False
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _HeadTooLarge
        super().on_headers_complete()
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]
        if self._is_old:
            self.cycle.default_headers = [*self.cycle.default_headers, _CLOSE]
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # after a rejection, the client may or may not send the body
        if self.pipeline:
            self._reading.stop()
        else:
            self._restart_read_timer()

    def on_body(self, body: bytes) -> None:
        """Part of the body arrived. After the response it is discarded, so that the client can read the response."""
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop(len(body))

    def on_message_complete(self) -> None:
        """A request is complete."""
        self._unfinished = False
        self._reading.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A response is complete; the next request may be waiting for its body."""
        if self.lingers:
            return
        super().on_response_complete()
        if self._unfinished:
            self._restart_read_timer()

    def pause_writing(self) -> None:
        """The client reads slowly."""
        super().pause_writing()
        if not self._writing.begun:
            self._writing.begin(self._limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read some bytes."""
        self._writing.stop()
        super().resume_writing()

    def end(self) -> None:
        """Answer a request without a response with 503, because its work is cancelled next."""
        if self._answering and not self.cycle.response_started:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "the service is stopping", within=_LAST_SECONDS)

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_old(self) -> bool:
        age = self._limits.age_seconds
        return age > 0 and self.loop.time() - self._made_at >= age

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _HEAD_BYTES:
            raise _HeadTooLarge

    def _restart_read_timer(self) -> None:
        self._reading.begin(self._limits.read_seconds, self._on_read_timeout)

    def _on_read_timeout(self) -> None:
        self._reading.stop()
        if self._unfinished and not self._in_head and not self._answering:
            self.transport.close()  # the response was sent; only the rest of the body is missing
        else:
            message = f"the request was not complete within {self._limits.read_seconds} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message, within=_LAST_SECONDS)

    def _linger(self, seconds: float) -> None:
        """Stop sending, and discard input for at most this long, because most clients read after they have sent all."""
        if self.lingers or self.transport.is_closing():
            return
        self.lingers = True
        self._unset_keepalive_if_required()
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._reading.begin(min(seconds, self._limits.read_seconds), self.transport.close)

    def _drop(self, size: int) -> None:
        self._unread_bytes += size
        if self._unread_bytes > _MAX_UNREAD_BYTES:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str, within: float | None = None) -> None:
        """Send an error, unless a response has started, and close within this time."""
        if self.transport.is_closing() or (self._answering and self.cycle.response_started):
            self.transport.close()
            return
        if self._answering:
            self.cycle.scope["state"][REJECTED_STATUS] = status.value
        else:
            self._on_rejected(status.value)
        self.transport.write(_refusal(status, message))
        self._linger(self._limits.read_seconds if within is None else within)


def _refusal(status: HTTPStatus, message: str) -> bytes:
    """Return a whole response in OpenAI's format."""
    code = status.phrase.lower().replace(" ", "_")
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    again = "retry-after: 1\r\n" if status is HTTPStatus.SERVICE_UNAVAILABLE else ""
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n{again}\r\n".encode() + body
