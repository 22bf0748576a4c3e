"""Requests that are certain to go on for as long as a test needs them to."""

import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from tests.running_quire import CALL_SECONDS

# Half a megabyte, most of it alternatives to each token: twice what lies between a server and a client that does not
# read, if its connection has so small a buffer. It fits into a small pool beside another stream.
LONG_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "On and on"}], "max_tokens": 400}
LONG_CHAT |= {"ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}
RECEIVE_BYTES = 4096


@contextmanager
def held_stream(
    url: str, headers: Mapping[str, str] | None = None, verify: ssl.SSLContext | bool = True
) -> Iterator[httpx.Response]:
    """Begin a chat that does not end for the gateway before its client, who reads nothing of it, goes away.

    The engine may have come to its end.
    """
    options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)]
    transport = httpx.HTTPTransport(verify=verify, socket_options=options)
    with (
        httpx.Client(base_url=url, transport=transport, timeout=CALL_SECONDS, headers=headers) as client,
        client.stream("POST", "/v1/chat/completions", json=LONG_CHAT) as response,
    ):
        assert response.status_code == 200, response.read()
        yield response
