"""Listening ZeroMQ sockets: their addresses and bounds."""

import os
import socket as network
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from services.engine.events.zeromq.curve import CurveServer
from services.runtime.transport import AddressUnavailable

# Of a part of a message that is received: a subscription, a request, or the longest of a handshake, CURVE's INITIATE,
# which has some 300 bytes. A longer subscription than the topic matches nothing.
_MOST_RECEIVED_BYTES = 512
# Of a peer: the messages that wait here for their reader, and the kernel's buffer.
_RECEIVE_QUEUE = 4
_RECEIVE_BUFFER_BYTES = 4 << 10
_HANDSHAKE_MILLISECONDS = 5000
# Hosts that vanish are noticed by the kernel: not all libraries of routers answer ZeroMQ's own heartbeats.
_KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 30),
    (zmq.TCP_KEEPALIVE_INTVL, 10),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)

AnySocket = zmq.Socket[Any]


def listen(
    socket: AnySocket, name: str, address: str, *, domain: str, queue: int, curve: CurveServer | None, longest: int = 0
) -> str:
    """Bind a socket to host:port, with at most `queue` messages that wait for a peer, and return the address.

    `domain` is that of ZAP. A message that is received has at most 512 bytes, and `longest` for a topic. Raises
    AddressUnavailable, with the name of the setting.
    """
    socket.sndhwm = queue
    socket.rcvhwm = _RECEIVE_QUEUE
    socket.rcvbuf = _RECEIVE_BUFFER_BYTES
    socket.maxmsgsize = _MOST_RECEIVED_BYTES + longest
    socket.handshake_ivl = _HANDSHAKE_MILLISECONDS
    socket.linger = 0
    for option, value in _KEEPALIVE:
        socket.setsockopt(option, value)
    if curve:
        socket.zap_domain = domain.encode()
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        curve.protect(socket)
    host, _, port = address.rpartition(":")
    try:
        socket.bind(f"tcp://{_interface(socket, host)}:{port}")
    except (zmq.ZMQError, network.gaierror) as error:
        reason = os.strerror(error.errno) if isinstance(error, zmq.ZMQError) and error.errno else str(error)
        raise AddressUnavailable(f"{name}: cannot listen on {address}: {reason}") from error
    return f"{host}:{str(socket.get_string(zmq.LAST_ENDPOINT)).rpartition(':')[2]}"


def _interface(socket: AnySocket, host: str) -> str:
    """Return a host in ZeroMQ's notation, which resolves no names. Raises gaierror."""
    if not host:
        return "*"
    family, *_, place = network.getaddrinfo(host.strip("[]"), None, type=network.SOCK_STREAM)[0]
    socket.ipv6 = family == network.AF_INET6
    return f"[{place[0]}]" if socket.ipv6 else str(place[0])


class ConnectionWatch:
    """Follows the connection of a connecting socket."""

    def __init__(self, socket: AnySocket) -> None:
        """Watch from now on; before the socket connects."""
        self._socket = socket
        self._owner = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._monitor: Any = zmq.Socket.shadow(self._owner)  # whose reads are no coroutines
        self._is_connected = False
        self._lost = False

    @property
    def is_connected(self) -> bool:
        """Whether a connection stands, its handshake included."""
        self._update()
        return self._is_connected

    def take_loss(self) -> bool:
        """Return whether a connection was lost since the last call."""
        self._update()
        lost, self._lost = self._lost, False
        return lost

    def _update(self) -> None:
        while True:
            try:
                frames = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._is_connected = parse_monitor_message(frames)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._lost |= not self._is_connected

    def close(self) -> None:
        """Watch no more; before the socket is closed."""
        self._owner.close(linger=0)
        self._socket.disable_monitor()
