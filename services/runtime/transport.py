"""gRPC servers and channels of Quire: message limits, keepalive, addresses, and the event loop that they run on.

A test pings, because grpc silently ignores misspelled channel arguments.
"""

import asyncio
import atexit
import errno
import fcntl
import os
import selectors
import socket
import stat
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVarTuple

import grpc

from services.runtime.addresses import port_fault
from services.runtime.interceptors import MalformedRequests
from services.runtime.tls import ClientTLS, ServerTLS

MIB = 1024 * 1024
CLIENT_MESSAGE_BYTES = 4 * MIB
LINK_MESSAGE_BYTES = 64 * MIB
# Maximum of a block step to the KV manager: a prompt of two million tokens, and all other items.
STEP_MESSAGE_BYTES = 8 * MIB

_PING_SECONDS = 10
_PING_TIMEOUT_SECONDS = 5
_FASTEST_CLIENT_PING_SECONDS = 5

# All metadata of a call together: for clients, an API key and trace context.
_METADATA_BYTES = 16 * 1024
# Concurrent calls per connection. A gateway's clients may share one connection, so it equals max_requests' default.
_STREAMS_PER_CONNECTION = 1024
# Per server. More connections are closed at once, so that file descriptors remain for links and models.
_CONNECTIONS = 4096
# Limit for the handshake of a new connection.
_HANDSHAKE_SECONDS = 10

# A compressed message of a megabyte may be a gigabyte, and gRPC compares it with its bound only afterwards.
_NO_COMPRESSION = 1 << grpc.Compression.NoCompression

_NO_COUNT = b"\0" * 4  # the space for an int

# gRPC reads the largest number as infinite.
_NO_LIMIT = 2**31 - 1

_UNIX = "unix:"
_NUMBERS = count()  # of the sockets of this process

Options = list[tuple[str, int | str]]

_Arguments = TypeVarTuple("_Arguments")


class TimedSelector(selectors.DefaultSelector):
    """Measures how long it waits."""

    waited_seconds = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events."""
        begun = time.monotonic()
        events = super().select(timeout)
        self.waited_seconds += time.monotonic() - begun
        return events


class ServiceLoop(asyncio.SelectorEventLoop):
    """An event loop that wakes up once for many finished operations of gRPC.

    A thread of grpc.aio writes a byte for each. Its reader handles all operations, but takes only one byte, so that
    the loop would wake up again for each byte left.
    """

    def __init__(self) -> None:
        self.selector = TimedSelector()
        super().__init__(self.selector)

    def add_reader(self, fd: Any, callback: Callable[[*_Arguments], Any], *args: *_Arguments) -> None:
        """Watch a file descriptor."""
        if is_grpc_reader(callback):
            super().add_reader(fd, lambda *given: _handle_together(fd.fileno(), callback, *given), *args)
        else:
            super().add_reader(fd, callback, *args)


def waited_seconds() -> Callable[[], float] | None:
    """Return a function that returns how long the running loop has waited in total; None if it does not measure it."""
    loop = asyncio.get_running_loop()
    return partial(getattr, loop.selector, "waited_seconds") if isinstance(loop, ServiceLoop) else None


def is_grpc_reader(callback: Callable[..., Any]) -> bool:
    """Return whether this is grpc.aio's reader of finished operations."""
    method = callback.func if isinstance(callback, partial) else callback
    return type(getattr(method, "__self__", None)).__name__ == "PollerCompletionQueue"


def _handle_together(fd: int, callback: Callable[..., Any], *args: Any) -> None:
    """Leave one byte, which the callback waits for. Bytes of later operations are not counted yet."""
    count = int.from_bytes(fcntl.ioctl(fd, termios.FIONREAD, _NO_COUNT), sys.byteorder)
    if count > 1:
        os.read(fd, count - 1)
    callback(*args)


class AddressUnavailable(Exception):
    """The server cannot listen on an address; the message has the reason."""


def server(
    message_bytes: int,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    answer_bytes: int = 0,
    connection_age_seconds: float = 0.0,
) -> grpc.aio.Server:
    """Make a server for messages of up to `message_bytes`, without services and address.

    Sent messages have the same limit, or `answer_bytes`. A connection of `connection_age_seconds` accepts no new calls,
    so that its client connects again; calls in flight continue. 0: no limit.
    """
    options = [*_common_options(message_bytes, answer_bytes), *_server_options()]
    if connection_age_seconds:
        # gRPC varies the age by a tenth, so that clients do not connect again all at once.
        options.append(("grpc.max_connection_age_ms", int(connection_age_seconds * 1000)))
        options.append(("grpc.max_connection_age_grace_ms", _NO_LIMIT))
    return grpc.aio.server(options=options, interceptors=[MalformedRequests(), *interceptors])


def channel(address: str, message_bytes: int = LINK_MESSAGE_BYTES, tls: ClientTLS | None = None) -> grpc.aio.Channel:
    """Open a channel with its own connection to `address` (`host:port` or `unix:/path`).

    With `tls` it is encrypted, except over Unix sockets.
    """
    options = channel_options(message_bytes)
    if tls is None or address.startswith(_UNIX):
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def channel_options(message_bytes: int = LINK_MESSAGE_BYTES) -> Options:
    """Return channel options: pings also while idle, so that an unresponsive peer counts as disconnected."""
    return [*_common_options(message_bytes), ("grpc.use_local_subchannel_pool", 1)]


def bind(server: grpc.aio.Server, address: str, tls: ServerTLS | None = None) -> str:
    """Listen on `address`; return it with the actual port in place of port 0. Raises AddressUnavailable.

    With `tls` all connections are encrypted, except over Unix sockets.
    """
    if fault := _port_fault(address):
        raise AddressUnavailable(f"cannot listen on {address}: {fault}")
    if address.startswith(_UNIX):
        _bind_socket(server, address)
        return address
    try:
        secure = tls and tls.credentials()
        port = server.add_secure_port(address, secure) if secure else server.add_insecure_port(address)
    except RuntimeError as error:
        raise AddressUnavailable(f"cannot listen on {address}: {_bind_fault(address)}") from error
    host, _, wanted = address.rpartition(":")
    return f"{host}:{port}" if wanted == "0" else address


def _bind_socket(server: grpc.aio.Server, address: str) -> None:
    """Listen on a Unix socket, in place of one that a dead process left. Raises AddressUnavailable.

    gRPC replaces a socket that another server listens on, and when it stops removes whatever has the name then. So it
    gets a name that nobody else uses, and the socket moves to its place while no other server looks at the folder.
    """
    path = Path(address.removeprefix(_UNIX))
    try:
        with _locked(path.parent):
            if fault := _socket_fault(path):
                raise AddressUnavailable(f"cannot listen on {address}: {fault}")
            own = path.with_name(f".{os.getpid():x}{next(_NUMBERS):x}")
            server.add_insecure_port(f"{_UNIX}{own}")
            own.replace(path)
            _remove_at_exit(path)
    except RuntimeError as error:
        raise AddressUnavailable(f"cannot listen on {address}: {_bind_fault(f'{_UNIX}{own}')}") from error
    except OSError as error:
        raise AddressUnavailable(f"cannot listen on {address}: {error.strerror or error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one server at a time look for a socket in a folder, and replace it. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _socket_fault(path: Path) -> str:
    """Return why a socket cannot be put at a path; empty: nothing is there, or a socket that nobody listens on."""
    try:
        if not stat.S_ISSOCK(path.stat(follow_symlinks=False).st_mode):
            return f"{str(path)!r} exists and is not a socket"
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            client.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        return ""
    except BlockingIOError:  # the queue of its listener is full
        pass
    except OSError as error:
        return error.strerror or str(error)
    return os.strerror(errno.EADDRINUSE)


def _remove_at_exit(path: Path) -> None:
    """Remove a socket when this process ends, unless another one is in its place by then."""
    found = path.absolute(), path.stat().st_ino

    def remove() -> None:
        with suppress(OSError), _locked(found[0].parent):
            if found[0].stat().st_ino == found[1]:
                found[0].unlink()

    atexit.register(remove)


def _port_fault(address: str) -> str:
    port = address.rpartition(":")[2]
    return "" if address.startswith(_UNIX) or not port.isdecimal() else port_fault(port)


def listen_fault(address: str) -> str:
    """Return why a server could not listen on an address at present; empty: it could. It is bound for a moment.

    For host:port, one of the host's addresses must be free; for unix:/path, the folder must exist, and no server may
    listen there.
    """
    if address.startswith(_UNIX):
        path = Path(address.removeprefix(_UNIX))
        return _socket_fault(path) if path.parent.is_dir() else f"there is no folder {str(path.parent)!r}"
    host, _, port = address.rpartition(":")
    faults = []
    try:
        places = socket.getaddrinfo(
            host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (ValueError, OSError):
        return ""  # perhaps in a notation of gRPC: the server itself reports it
    for family, kind, _, _, place in places:
        try:
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
                listener.bind(place)
            return ""
        except OSError as error:
            faults.append(error.strerror or str(error))
    return faults[0]


def _bind_fault(address: str) -> str:
    """Return the operating system's reason why binding an address fails; gRPC does not report it."""
    host, _, port = address.rpartition(":")
    try:
        family: int = socket.AF_UNIX
        place: Any = address.removeprefix(_UNIX)
        if not address.startswith(_UNIX):
            family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port))[0]
        with socket.socket(family) as listener:
            listener.bind(place)
    except ValueError:
        return "the address must be host:port or unix:/path"
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC cannot bind the address"


def _common_options(message_bytes: int, sent_bytes: int = 0) -> Options:
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", sent_bytes or message_bytes),
        ("grpc.keepalive_time_ms", _PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC's own pings measure the bandwidth of busy connections. Keepalive pings wait for them, by default up to a
        # minute.
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_SECONDS * 1000),
    ]


def _server_options() -> Options:
    return [
        ("grpc.http2.min_ping_interval_without_data_ms", _FASTEST_CLIENT_PING_SECONDS * 1000),
        ("grpc.http2.max_ping_strikes", 3),
        # gRPC starts to refuse calls at random at the first limit, and refuses all at the second.
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
        ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_SECONDS * 1000),
        ("grpc.compression_enabled_algorithms_bitset", _NO_COMPRESSION),
        # Otherwise two servers on one port would silently share its connections.
        ("grpc.so_reuseport", 0),
    ]
