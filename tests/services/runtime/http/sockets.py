"""The TCP connections of this process, as the kernel knows them."""

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Connection(NamedTuple):
    """One end of a connection that this process has."""

    own: tuple[str, int]
    peer: tuple[str, int]
    no_delay: bool


def connections(port: int) -> list[Connection]:
    """Return the ends of connections to a port of this machine: both, where this process is client and server."""
    found = [_connection(int(one.name)) for one in Path("/proc/self/fd").iterdir()]
    return [one for one in found if one and port in (one.own[1], one.peer[1])]


def _connection(descriptor: int) -> Connection | None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as end:  # no socket, a listener, or gone
        own, peer = end.getsockname()[:2], end.getpeername()[:2]
        return Connection(own, peer, bool(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
    return None
