"""The TCP connections of this process."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Connection(NamedTuple):
    """One end of a connection."""

    own: tuple[str, int]
    peer: tuple[str, int]
    no_delay: bool


def connections(port: int) -> list[Connection]:
    """Return the ends, in this process, of connections to a local port."""
    found = [_connection(int(one.name)) for one in Path("/proc/self/fd").iterdir()]
    return [one for one in found if one and port in (one.own[1], one.peer[1])]


def _connection(descriptor: int) -> Connection | None:
    with suppress(OSError):  # a listener, or closed
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):  # the duplicate of what is no socket would stay open
            with socket.socket(fileno=os.dup(descriptor)) as end:
                own, peer = end.getsockname()[:2], end.getpeername()[:2]
                return Connection(own, peer, bool(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
    return None
