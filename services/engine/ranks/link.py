"""Messages between rank 0 and another rank, over one socket.

A message is a length (4 bytes), a kind (1 byte) and a body. The end of the file means that the other process has ended.
"""

import socket
import struct
import threading
from contextlib import suppress
from enum import IntEnum, auto
from typing import NamedTuple

from engine.errors import RankFailed

MAX_BODY_BYTES = 1 << 26
_FRAME = struct.Struct("<IB")
_TIMEVAL = struct.Struct("ll")


class Kind(IntEnum):
    """What a message says. Rank 0 sends the first four, the other rank the others."""

    START = auto()  # settings, number of the rank and port of the store, as JSON
    CONNECT = auto()  # all ranks are ready to load their slices
    PLAN = auto()
    HEARTBEAT = auto()
    READY = auto()  # for the next message; the first has what must be the same on all ranks, as JSON
    LAUNCHED = auto()  # the oldest plan that was not
    ALIVE = auto()  # in answer to a heartbeat
    FAILED = auto()  # the reason, as text
    LOST = auto()  # a collective failed, so another rank has: the error, as text


class Message(NamedTuple):
    """A received message."""

    kind: Kind
    body: bytes


class RankLink:
    """One end of the socket. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Take over a connected socket. `peer` names the other end in messages."""
        self.peer = peer
        self._socket = connection
        self._sending = threading.Lock()  # plans and heartbeats come from two threads

    def limit_sending(self, seconds: float) -> None:
        """From now on sending fails if the other end does not read for so long."""
        self._limit(socket.SO_SNDTIMEO, seconds)

    def limit_receiving(self, seconds: float) -> None:
        """From the next message on receiving fails if the other end sends nothing for so long."""
        self._limit(socket.SO_RCVTIMEO, seconds)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Send a message. Raises RankFailed if the other end has ended, or does not read."""
        try:
            with self._sending:
                self._socket.sendall(_FRAME.pack(len(body), kind) + body)
        except BlockingIOError as error:
            raise RankFailed(f"{self.peer} does not read its messages") from error
        except OSError as error:
            raise RankFailed(f"{self.peer} has ended") from error

    def receive(self) -> Message | None:
        """Return the next message, None at the end of the file. Raises RankFailed if none arrives in time."""
        try:
            header = self._read(_FRAME.size)
            if header is None:
                return None
            length, kind = _FRAME.unpack(header)
            if length > MAX_BODY_BYTES or kind not in list(Kind):
                raise RankFailed(f"{self.peer} sent a damaged message")
            body = self._read(length)
        except BlockingIOError as error:
            raise RankFailed(f"{self.peer} has sent nothing for too long") from error
        except OSError:
            return None
        return None if body is None else Message(Kind(kind), body)

    def close(self) -> None:
        """Close the connection: the other end receives the end of the file."""
        with suppress(OSError):  # the other end may have closed it
            self._socket.shutdown(socket.SHUT_RDWR)  # also wakes a thread that receives
        self._socket.close()

    def _limit(self, option: int, seconds: float) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1_000_000)))

    def _read(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                return None
            parts += part
        return bytes(parts)
