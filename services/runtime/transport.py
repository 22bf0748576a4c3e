"""How Quire's gRPC servers and channels are set up: message limits, keepalive, addresses.

The keepalive names are those of grpc's channel arguments: a wrong one is ignored without a word, so a test pings.
"""

import socket
from collections.abc import Sequence
from typing import Any

import grpc

from services.runtime.interceptors import MalformedRequests
from services.runtime.tls import ClientTLS, ServerTLS

MIB = 1024 * 1024
CLIENT_MESSAGE_BYTES = 4 * MIB
LINK_MESSAGE_BYTES = 64 * MIB
# What a KV manager takes: a prompt of two million tokens and all else that is in its Step.
STEP_MESSAGE_BYTES = 8 * MIB

_PING_SECONDS = 10
_PING_TIMEOUT_SECONDS = 5
_FASTEST_CLIENT_PING_SECONDS = 5

# Of all metadata of a call together. Of a client, that is a key and what tracing adds.
_METADATA_BYTES = 16 * 1024
# At the same time. A gateway's clients may share one connection, and it takes as many requests by default.
_STREAMS_PER_CONNECTION = 1024
# Of one server. More are closed as they come, so that there are always files left for the links and for the models.
_CONNECTIONS = 4096
# After which a connection that says nothing, or not what it should, is closed before it begins.
_HANDSHAKE_SECONDS = 10

_UNIX = "unix:"

Options = list[tuple[str, int | str]]


class AddressUnavailable(Exception):
    """An address that cannot be listened on; the message says why."""


def server(
    message_bytes: int, interceptors: Sequence[grpc.aio.ServerInterceptor] = (), answer_bytes: int = 0
) -> grpc.aio.Server:
    """Make a server that takes messages of up to `message_bytes`, without services or address yet.

    It sends messages of that size, or of up to `answer_bytes`.
    """
    options = [*_common_options(message_bytes, answer_bytes), *_server_options()]
    return grpc.aio.server(options=options, interceptors=[MalformedRequests(), *interceptors])


def channel(address: str, message_bytes: int = LINK_MESSAGE_BYTES, tls: ClientTLS | None = None) -> grpc.aio.Channel:
    """Open a channel of its own connection to `address` (`host:port` or `unix:/path`).

    It is encrypted where `tls` says whom to trust, but for Unix sockets.
    """
    options = channel_options(message_bytes)
    if tls is None or address.startswith(_UNIX):
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, tls.credentials(), options=options)


def channel_options(message_bytes: int = LINK_MESSAGE_BYTES) -> Options:
    """Return the options of a channel: it pings also while idle, and sees a peer that stopped as a broken link."""
    return [*_common_options(message_bytes), ("grpc.use_local_subchannel_pool", 1)]


def bind(server: grpc.aio.Server, address: str, tls: ServerTLS | None = None) -> str:
    """Listen on `address`; return it with the port that port 0 became. Raises AddressUnavailable.

    With `tls` nobody gets in without, but over Unix sockets.
    """
    try:
        if tls is None or address.startswith(_UNIX):
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, tls.credentials())
    except RuntimeError as error:
        raise AddressUnavailable(f"cannot listen on {address}: {_obstacle(address)}") from error
    host, _, wanted = address.rpartition(":")
    return f"{host}:{port}" if wanted == "0" and not address.startswith(_UNIX) else address


def _obstacle(address: str) -> str:
    """Ask the operating system why an address cannot be had: gRPC keeps that to itself."""
    host, _, port = address.rpartition(":")
    try:
        family: int = socket.AF_UNIX
        place: Any = address.removeprefix(_UNIX)
        if not address.startswith(_UNIX):
            family, _, _, _, place = socket.getaddrinfo(host.strip("[]"), int(port))[0]
        with socket.socket(family) as listener:
            listener.bind(place)
    except ValueError:
        return "it is neither host:port nor unix:/path"
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC cannot bind it"


def _common_options(message_bytes: int, sent_bytes: int = 0) -> Options:
    return [
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", sent_bytes or message_bytes),
        ("grpc.keepalive_time_ms", _PING_SECONDS * 1000),
        ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_SECONDS * 1000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # gRPC's own pings, which measure the bandwidth of a busy connection, keep those of keepalive from being sent
        # until they are answered or given up, by default after a minute.
        ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_SECONDS * 1000),
    ]


def _server_options() -> Options:
    return [
        ("grpc.http2.min_ping_interval_without_data_ms", _FASTEST_CLIENT_PING_SECONDS * 1000),
        ("grpc.http2.max_ping_strikes", 3),
        # The first is where gRPC begins to refuse calls at random, the second where it refuses all.
        ("grpc.max_metadata_size", _METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _METADATA_BYTES),
        ("grpc.max_concurrent_streams", _STREAMS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_SECONDS * 1000),
        # Two servers on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
    ]
