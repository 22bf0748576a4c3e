"""A parser of HTTP/1.1 requests in uvicorn's place of httptools', with bounds and without upgrades."""

from typing import Protocol

import httptools

from services.runtime.http.faults import HEAD_BYTES, MAX_HEADERS, FaultyRequest, HeadTooLarge, fault_of

# Parsed together. httptools cannot stop, so this bounds the requests that are parsed beyond those that may wait.
_PIECE_BYTES = 1024
# Headers of an offer to change the protocol, which a server may ignore. Clients of HTTP/2 send them at first.
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings")


class RequestCallbacks(Protocol):
    """What httptools calls; see there."""

    def on_message_begin(self) -> None: ...  # noqa: D102
    def on_url(self, url: bytes) -> None: ...  # noqa: D102
    def on_header(self, name: bytes, value: bytes) -> None: ...  # noqa: D102
    def on_headers_complete(self) -> None: ...  # noqa: D102
    def on_body(self, body: bytes) -> None: ...  # noqa: D102
    def on_message_complete(self) -> None: ...  # noqa: D102


class RequestParser:
    """Parses the requests of one connection, as many pieces of its input as its user asks for.

    A head that offers to change the protocol is parsed again without the offer, because httptools then takes the body
    for another protocol's bytes.
    """

    def __init__(self, callbacks: RequestCallbacks) -> None:
        self._callbacks = callbacks
        self._parser = self._fresh()
        self.input = bytearray()
        self.in_head = False
        self.unfinished = False  # a request has begun and is incomplete
        self._offers = False
        self._head_bytes = self._incomplete_head_bytes = 0
        self._url, self._headers = b"", list[tuple[bytes, bytes]]()

    def parse_piece(self) -> None:
        """Parse the next piece of the input. Raises FaultyRequest."""
        piece = bytes(self.input[:_PIECE_BYTES])
        del self.input[:_PIECE_BYTES]
        began_before = self.in_head
        try:
            self._feed(piece)
            if began_before and self.in_head:  # httptools reports a header only when it is complete
                self._incomplete_head_bytes += len(piece)
                if self._incomplete_head_bytes > HEAD_BYTES:
                    raise HeadTooLarge
        except (HeadTooLarge, httptools.HttpParserError) as error:
            raise FaultyRequest(fault_of(error, piece + self.input)) from error

    def get_http_version(self) -> str:
        """Return the version of the request, such as 1.1."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """Return the method of the request."""
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        """Return True if further requests may follow."""
        return self._parser.should_keep_alive() and not self._parser.should_upgrade()

    def should_upgrade(self) -> bool:
        """Return False: offers are ignored."""
        return False

    def on_message_begin(self) -> None:
        """A request begins."""
        self.in_head = self.unfinished = True
        self._head_bytes = self._incomplete_head_bytes = 0
        self._url, self._headers = b"", []
        self._callbacks.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Part of the path arrived."""
        self._count(len(url))
        self._url += url
        self._callbacks.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header arrived."""
        self._count(len(name) + len(value))
        if len(self._headers) >= MAX_HEADERS:
            raise HeadTooLarge
        self._headers.append((name, value))
        self._callbacks.on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self.in_head = False
        # CONNECT is no offer: what follows it is another protocol.
        self._offers = self._parser.should_upgrade() and self.get_method() != b"CONNECT"
        if not self._offers:
            self._callbacks.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body arrived."""
        self._callbacks.on_body(body)

    def on_message_complete(self) -> None:
        """A request is complete."""
        if not self._offers:
            self.unfinished = False
            self._callbacks.on_message_complete()

    def _fresh(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def _feed(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._offers:
                    return
                data = self._head_without_offer() + data[upgrade.args[0] :]
                self._parser = self._fresh()

    def _head_without_offer(self) -> bytes:
        lines = [b"%b %b HTTP/%b" % (self.get_method(), self._url, self.get_http_version().encode())]
        for name, value in self._headers:
            if name.lower() == b"connection":
                value = b",".join(one for one in value.split(b",") if one.strip().lower() not in _UPGRADE_HEADERS)
            if name.lower() not in _UPGRADE_HEADERS:
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            raise HeadTooLarge
