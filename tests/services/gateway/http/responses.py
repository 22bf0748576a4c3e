"""Readers of HTTP responses."""

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx


def rejection(response: httpx.Response) -> tuple[int, str]:
    """Return the status and the code of an error."""
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Yield the JSON values of a stream's events up to `[DONE]`."""
    assert response.headers["content-type"].startswith("text/event-stream"), response.status_code
    lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
    for line in lines:
        if line == "[DONE]":
            assert list(lines) == []
            return
        yield json.loads(line)
    raise AssertionError("the stream has no [DONE]")


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes or resets the connection."""
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)
