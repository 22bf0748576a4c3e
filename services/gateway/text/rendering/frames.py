"""Messages between a gateway and a process that renders templates: a length, then JSON."""

import json
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
# A request has at most one message of gRPC or one body; a prompt is bounded by the process.
MAX_FRAME_BYTES = 256 * 1024 * 1024


def send(connection: socket.socket, value: Any) -> None:
    """Send a value. Raises OSError, which includes a timeout of the connection."""
    content = json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass")
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> Any:
    """Receive a value. Raises EOFError if the other side has ended, OSError, and ValueError for no such message."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a message must have at most {MAX_FRAME_BYTES} bytes, not {length}")
    return json.loads(_exactly(connection, length).decode(errors="surrogatepass"))


def _exactly(connection: socket.socket, length: int) -> bytearray:
    content = bytearray(length)
    rest = memoryview(content)
    while rest:
        if not (count := connection.recv_into(rest)):
            raise EOFError
        rest = rest[count:]
    return content
