"""Counts and bounds the connections of a listening ZeroMQ socket, and the bytes that each one sends.

ZeroMQ bounds neither the connections nor what one sends: subscriptions, parts of a message and requests take memory
and time without limit. Its monitor reports the file descriptor of each connection; the kernel counts the bytes that
arrived there. A connection that exceeds a bound is shut down, which ZeroMQ takes for the peer's end. Only Linux counts
the bytes.
"""

import os
import socket as network
import struct
from collections.abc import Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from services.engine.events.zeromq.sockets import AnySocket

MOST_CONNECTIONS = 64
"""Of a socket, those in their handshake included."""

# What a connection may send at once, its handshake among it, and then in each second. Routers send one subscription of
# a few bytes, requests of some 30 bytes, and heartbeats.
_BURST_BYTES = 4 << 10
_BYTES_A_SECOND = 1 << 10

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_WATCHED = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | _REFUSED
# `tcpi_bytes_received` of Linux' `struct tcp_info` (include/uapi/linux/tcp.h), since 4.1.
_RECEIVED_OFFSET, _INFO_BYTES = 128, 136


@dataclass
class _Connection:
    received: int = 0
    allowance: float = _BURST_BYTES
    ended: bool = False


class Connections:
    """Counts the open connections of a socket, the refused ones, and those that were ended because they sent too much.

    A connection without the right key, with another protocol, or beyond the bound, is refused. `watch` and what it
    calls belong to one thread; others may read the counts.
    """

    def __init__(self, socket: AnySocket, domain: str) -> None:
        """Count from now on; before the socket is bound. ZeroMQ waits for `watch` when many events are not read."""
        self._address = f"inproc://connections-{domain}"
        socket.monitor(self._address, _WATCHED)
        self._open: dict[int, _Connection] = {}
        self._excess: set[int] = set()
        self._failed = False
        self._most = MOST_CONNECTIONS
        self.port = 0
        self.refused = 0
        self.ended = 0

    @property
    def count(self) -> int:
        """Open connections, some of which may be in their handshake."""
        return len(self._open)

    async def watch(self, context: zmq.asyncio.Context, accepted: Callable[[], None]) -> None:
        """Follow what happens to connections, until cancelled; call `accepted` for each new one."""
        with context.socket(zmq.PAIR) as monitor:
            monitor.linger = 0
            monitor.connect(self._address)
            while True:
                message = parse_monitor_message(await monitor.recv_multipart())
                self._apply(int(message["event"]), int(message["value"]))
                if message["event"] == zmq.EVENT_ACCEPTED:
                    accepted()

    def _apply(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._accept(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._open.pop(value, None)
            if value in self._excess:
                self._excess.discard(value)
                self.refused += not self._failed  # its handshake may have been over
        else:
            self.refused += 1
        self._failed = bool(event & _REFUSED)

    def _accept(self, number: int) -> None:
        if len(self._open) < self._most:
            self._open[number] = _Connection()
        elif self._shut(number):
            self._excess.add(number)

    def admit_no_more(self) -> None:
        """Refuse connections from now on."""
        self._most = 0

    def limit(self, seconds: float) -> bool:
        """End connections that sent too much; `seconds` after the last call. Return whether any bytes arrived."""
        arrived = False
        for number, connection in self._open.items():
            received = self._received(number)
            earned = min(_BURST_BYTES, connection.allowance + seconds * _BYTES_A_SECOND)
            connection.allowance = earned - max(0, received - connection.received)
            arrived |= received > connection.received
            connection.received = max(received, connection.received)
            if connection.allowance < 0 and not connection.ended:
                self._end(number, connection)
        return arrived

    def end_largest(self) -> None:
        """End the connection that sent most."""
        standing = [item for item in self._open.items() if not item[1].ended]
        if standing:
            self._end(*max(standing, key=lambda item: item[1].received))

    def _end(self, number: int, connection: _Connection) -> None:
        """End a connection. ZeroMQ notices it when it has passed on what it read."""
        connection.ended = self._shut(number)
        self.ended += connection.ended

    def _received(self, number: int) -> int:
        """Return the bytes that arrived at a connection; 0 where the system does not count them."""
        found = self._duplicate(number)
        if found is None or not hasattr(network, "TCP_INFO"):
            return 0
        with found:
            info = found.getsockopt(network.IPPROTO_TCP, network.TCP_INFO, _INFO_BYTES)
        received: int = struct.unpack_from("Q", info, _RECEIVED_OFFSET)[0] if len(info) == _INFO_BYTES else 0
        return received

    def _shut(self, number: int) -> bool:
        """Shut a connection down; return False if it is closed already."""
        found = self._duplicate(number)
        if found is None:
            return False
        with found:
            try:
                found.shutdown(network.SHUT_RDWR)
            except OSError:
                return False
        return True

    def _duplicate(self, number: int) -> network.socket | None:
        """Return another handle of a connection, None if ZeroMQ has closed it, and the number is perhaps another's."""
        try:
            handle = os.dup(number)
        except OSError:
            return None
        try:
            found = network.socket(fileno=handle)
        except OSError:
            os.close(handle)
            return None
        if found.family in (network.AF_INET, network.AF_INET6) and found.getsockname()[1] == self.port:
            return found
        found.close()
        return None
