"""An HTTP connection: uvicorn's protocol with additional limits."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from services.runtime.http.faults import Fault, FaultyRequest
from services.runtime.http.request_parser import RequestParser

# Requests that wait for their turn. Those behind them are not parsed, and then not read, before one is answered.
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
# An interim response, which clients ignore. One that is gone resets the connection, and the next write fails.
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PROBES = 3
_PROBE_SECONDS = 1.0
# uvicorn closes a connection after a response with it.
_CLOSE = (b"connection", b"close")


# Longer than clients and load balancers keep idle connections (most 60, Go's client 90), so that they close first.
IDLE_SECONDS = 120.0


@dataclass(frozen=True)
class HttpLimits:
    """Maximum connections, and time limits of each.

    `read_seconds` limits the head of a request, and its body. `write_seconds` without progress close the connection of
    a slow client. After `age_seconds` the next response is the last one of its connection; 0: no limit. Without a
    request for `idle_seconds` after a response, the connection is closed.
    """

    connections: int
    read_seconds: float
    write_seconds: float
    age_seconds: float = 0.0
    idle_seconds: float = IDLE_SECONDS


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

    Pipelined requests are answered one after the other; an error behind them is sent after their responses. A client
    that has closed its side of the connection gets its responses. `on_rejected` is called with the status of each
    response that the application never saw.
    """

    def __init__(
        self, limits: HttpLimits, config: Config, state: ServerState, on_rejected: Callable[[int], None]
    ) -> None:
        super().__init__(config=config, server_state=state, app_state={})
        self._limits = limits
        self._on_rejected = on_rejected
        self._reading = _Deadline(self.loop)
        self._writing = _Deadline(self.loop)
        self._probing = _Deadline(self.loop)
        self._requests = RequestParser(self)
        self.parser = self._requests  # type: ignore[assignment]
        self._answered: RequestResponseCycle | None = None  # the request that the application works on, or the last one
        self._fault: Fault | None = None  # sent when all requests before it are answered
        self._ended = False  # the client sends no more
        self._unread_bytes = 0
        self._made_at = self.loop.time()
        self.lingers = False  # the response is complete, and further input is discarded

    def close(self) -> None:
        """Stop sending, and close once the request is complete; it may have been answered before."""
        if self._requests.unfinished:
            self._linger(self._limits.read_seconds)
        else:
            self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, unless there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            self._refuse(Fault(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections", within=_LAST_SECONDS))
            if len(self.connections) > self._limits.connections + _MAX_REFUSED_CONNECTIONS:
                self.transport.close()
        else:
            self._restart_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and report the end to the application; requests that wait for their turn are dropped."""
        for timer in (self._reading, self._writing, self._probing):
            timer.stop()
        self.pipeline.clear()
        self._requests.input.clear()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, unless enough requests wait for their turn."""
        if self.transport.is_closing():
            return
        if self.lingers or self._fault:
            self._drop(len(data))
            return
        self._unset_keepalive_if_required()
        self._requests.input += data
        self._parse()

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. It gets the responses to its complete requests, unless it uses TLS or HTTP/1.0.

        Only a write shows whether it still receives. In the middle of a response it surely does not: clients that close
        only their side do so behind their requests, and a stream may write nothing for long.
        """
        self._ended = True
        if self.lingers or not self._answering or self.transport.get_extra_info("ssl_object"):
            return False
        if self._requests.unfinished and not self._requests.in_head:
            if self._answered is self.cycle:
                return False
            self.pipeline.popleft()
        assert self._answered is not None
        if self._answered.response_started or self._answered.scope["http_version"] == "1.0":
            return False
        self._requests.unfinished = False
        self._reading.stop()
        self._probe(_PROBES)
        return True

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._unread_bytes = 0
        self._restart_read_timer()

    def on_headers_complete(self) -> None:
        """The head is complete; the body has its own time limit, from its turn in the pipeline on."""
        super().on_headers_complete()
        self.cycle.transport = _ResponseTransport(self)  # type: ignore[assignment]
        age = self._limits.age_seconds
        if age > 0 and self.loop.time() - self._made_at >= age:
            self.cycle.default_headers = [*self.cycle.default_headers, _CLOSE]
        if self.expect_100_continue:
            self.cycle.keep_alive = False  # after a rejection, the client may or may not send the body
        if self.pipeline:
            self._reading.stop()
            self.flow.resume_reading()  # as long as few requests wait, the end of the connection is seen at once
        else:
            self._restart_read_timer()

    def on_body(self, body: bytes) -> None:
        """Part of the body arrived. After the response it is discarded, so that the client can read the response."""
        super().on_body(body)
        if self.cycle.response_complete:
            self._drop(len(body))

    def on_message_complete(self) -> None:
        """A request is complete."""
        self._reading.stop()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """A response is complete; the next request may be waiting for its turn, or for its body."""
        if self.lingers:
            return
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._requests.unfinished:
            self._restart_read_timer()
        if self._requests.input:
            self._unset_keepalive_if_required()
            self._parse()
        if self._fault and not self._answering:
            self._refuse(self._fault)
        elif self._ended and not self._answering:
            self.transport.close()

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
        if self._answering and self._answered is not None and not self._answered.response_started:
            self._refuse(Fault(HTTPStatus.SERVICE_UNAVAILABLE, "the service is stopping", within=_LAST_SECONDS))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def _parse(self) -> None:
        """Parse what has arrived, unless enough requests wait for their turn."""
        while self._requests.input and not (self._fault or self.lingers or self.transport.is_closing()):
            if len(self.pipeline) >= _MAX_PIPELINED:
                self.flow.pause_reading()
                return
            try:
                self._requests.parse_piece()
            except FaultyRequest as error:
                self._take(error.fault)
                return
        if not self._reading.begun and not self._requests.unfinished and not self._answering:
            self._restart_read_timer()  # for example after blank lines

    def _take(self, fault: Fault) -> None:
        """Refuse a request, after the responses to those before it."""
        if self._answering and self._requests.unfinished and not self._requests.in_head:
            if self._answered is self.cycle:  # its own body is at fault
                self._refuse(fault)
                return
            self.pipeline.popleft()
        if self._answering:
            self._fault = fault
            self._requests.unfinished = False
            self._reading.stop()
        else:
            self._refuse(fault)

    def _probe(self, left: int) -> None:
        """Write to a client that has closed its side, because it may have closed the other one, too."""
        if left and self._answering and self._answered is not None and not self._answered.response_started:
            self.transport.write(_PROBE)
            self._probing.begin(_PROBE_SECONDS, lambda: self._probe(left - 1))

    @property
    def _answering(self) -> bool:
        return self._answered is not None and not self._answered.response_complete

    def _restart_read_timer(self) -> None:
        self._reading.begin(self._limits.read_seconds, self._on_read_timeout)

    def _on_read_timeout(self) -> None:
        self._reading.stop()
        if self._requests.unfinished and not self._requests.in_head and not self._answering:
            self.transport.close()  # the response was sent; only the rest of the body is missing
        else:
            message = f"the request was not complete within {self._limits.read_seconds} s"
            self._take(Fault(HTTPStatus.REQUEST_TIMEOUT, message, within=_LAST_SECONDS))

    def _disconnect(self) -> None:
        """Report to the application that its client is gone."""
        if self._answering and self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()

    def _linger(self, seconds: float) -> None:
        """Stop sending, and discard input for at most this long, because most clients read after they have sent all."""
        if self.lingers or self.transport.is_closing():
            return
        self.lingers = True
        self._unset_keepalive_if_required()
        self._disconnect()
        if self._ended:
            self.transport.close()
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._reading.begin(min(seconds, self._limits.read_seconds), self.transport.close)

    def _drop(self, size: int) -> None:
        self._unread_bytes += size
        if self._unread_bytes > _MAX_UNREAD_BYTES:
            self.transport.close()

    def _refuse(self, fault: Fault) -> None:
        """Send an error, unless a response has started, and close within its time."""
        answered = self._answered if self._answering else None
        if self.transport.is_closing() or (answered and answered.response_started):
            self.transport.close()
            return
        if answered:
            answered.scope["state"][REJECTED_STATUS] = fault.status.value
        else:
            self._on_rejected(fault.status.value)
        self.transport.write(fault.response())
        self._linger(self._limits.read_seconds if fault.within is None else fault.within)
