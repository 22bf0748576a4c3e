"""One connection of HTTP, by uvicorn's protocol, with the bounds that it does not have."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

_HEAD_BYTES = 32 * 1024
_MOST_HEADERS = 100
# Requests that a client may send before the one before them is answered.
_MOST_PIPELINED = 8
# In the state of a request that was answered here while the application worked on it: the status.
REJECTED_STATUS = "rejected_status"
# Of a body that nobody reads any more, because its request has been answered: most clients read the answer only when
# they have sent all, and a connection that is closed before takes the answer along. None of it is kept.
_MOST_UNREAD_BYTES = 1024 * 1024 * 1024
# For the rest of what came too late.
_LAST_SECONDS = 1.0
# Connections too many that are told so; beyond these they are closed as they come.
_MOST_TURNED_AWAY = 64


@dataclass(frozen=True)
class HttpLimits:
    """How many connections there may be, and what each may take.

    `read_seconds` are for the head of a request, and again for its body; `write_seconds` without progress in reading an
    answer cut a client off.
    """

    connections: int
    read_seconds: float
    write_seconds: float


class _Deadline:
    """Does something unless it is stopped or begun anew before."""

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


class _AnswersTransport:
    """The transport of a request's answer, which is closed only when the rest of the request has come."""

    def __init__(self, connection: "HttpConnection") -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        """Send it."""
        self._connection.transport.write(data)

    def is_closing(self) -> bool:
        """Return whether nothing more can be sent."""
        return self._connection.lingers or self._connection.transport.is_closing()

    def close(self) -> None:
        """Send nothing more."""
        self._connection.close()


class HttpConnection(HttpToolsProtocol):
    """Closes what a client does not finish, and answers what cannot be parsed in OpenAI's shape.

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
        self._unfinished = False  # a request has begun and not come to its end
        self._head_bytes = 0
        self._unread_bytes = 0
        self.lingers = False  # all is said, and what still comes is dropped

    def close(self) -> None:
        """Send nothing more, and close when the request has come to its end, which may have been answered before."""
        if self._unfinished:
            self._linger(self._limits.read_seconds)
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "there are too many connections", within=_LAST_SECONDS)
            if len(self.connections) > self._limits.connections + _MOST_TURNED_AWAY:
                self.transport.close()
        else:
            self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._reading.stop()
        self._writing.stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if self.transport.is_closing():
            return
        if self.lingers:
            self._drop(len(data))
            return
        self._unset_keepalive_if_required()
        began_before = self._in_head
        try:
            self.parser.feed_data(data)
            if began_before and self._in_head:  # the parser tells of a header when it has all of it
                self._count_head(len(data))
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = False  # what follows is not HTTP/1.1
        except (_HeadTooLarge, httptools.HttpParserError) as error:
            if isinstance(error, _HeadTooLarge) or isinstance(error.__context__, _HeadTooLarge):
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head of the request is too large")
            else:
                self._refuse(HTTPStatus.BAD_REQUEST, "this is no request of HTTP/1.1")
        else:
            if not self._reading.begun and not self._unfinished and not self._answering:
                self._expect_more()  # blank lines, perhaps

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head = self._unfinished = True
        self._head_bytes = self._unread_bytes = 0
        self._expect_more()

    def on_url(self, url: bytes) -> None:
        """A part of the path came."""
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header came."""
        self._count_head(len(name) + len(value))
        if len(self.headers) >= _MOST_HEADERS:
            raise _HeadTooLarge
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head came to its end; its body has time of its own, from when its turn has come."""
        self._in_head = False
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise _HeadTooLarge
        super().on_headers_complete()
        self.cycle.transport = _AnswersTransport(self)  # type: ignore[assignment]
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # whether its body comes is not known once it is refused
        if self.pipeline:
            self._reading.stop()
        else:
            self._expect_more()

    def on_body(self, body: bytes) -> None:
        """A part of the body came. What nobody reads any more is taken for a while, so that the client hears why."""
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop(len(body))

    def on_message_complete(self) -> None:
        """A request came to its end."""
        self._unfinished = False
        self._reading.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A request was answered; the next one may wait, its body still to come."""
        if self.lingers:
            return
        super().on_response_complete()
        if self._unfinished:
            self._expect_more()

    def pause_writing(self) -> None:
        """The client does not read as fast as it is written to."""
        super().pause_writing()
        if not self._writing.begun:
            self._writing.begin(self._limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        """The client has read some."""
        self._writing.stop()
        super().resume_writing()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _HEAD_BYTES:
            raise _HeadTooLarge

    def _expect_more(self) -> None:
        self._reading.begin(self._limits.read_seconds, self._give_up)

    def _give_up(self) -> None:
        self._reading.stop()
        if self._unfinished and not self._in_head and not self._answering:
            self.transport.close()  # it has its answer, only the rest of its body is missing
        else:
            message = f"the request did not come within {self._limits.read_seconds} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, message, within=_LAST_SECONDS)

    def _linger(self, seconds: float) -> None:
        """Send nothing more, and drop what comes, for so long at most: most clients read when they have sent all."""
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
        if self._unread_bytes > _MOST_UNREAD_BYTES:
            self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str, within: float | None = None) -> None:
        """Say why, where nothing else is being said, and close, in so many seconds at most."""
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
    """Write a whole answer, in OpenAI's shape."""
    code = status.phrase.lower().replace(" ", "_")
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    body = json.dumps({"error": error}).encode()
    again = "retry-after: 1\r\n" if status is HTTPStatus.SERVICE_UNAVAILABLE else ""
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n{again}\r\n".encode() + body
