"""Admission of ZeroMQ connections: how many each socket has, and with CURVE whose they are.

ZeroMQ has no bound on connections; it asks for each one over ZAP (ZeroMQ's RFC 27), whatever its mechanism.
"""

import logging
from collections.abc import Mapping

import zmq
import zmq.auth
import zmq.auth.asyncio

from services.engine.events.zeromq.curve import AllowedClients
from services.engine.events.zeromq.sockets import Connections

MOST_CONNECTIONS = 64
"""Of a socket, those in their handshake included."""

_REQUEST_ID, _DOMAIN, _FRAMES = 1, 2, 6
_TRY_AGAIN = b"300"  # 400 would end a client for good


class Admission(zmq.auth.asyncio.AsyncioAuthenticator):
    """Decides on the connections of the sockets of a context, whose ZAP domains are the names of `connections`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        connections: Mapping[str, Connections],
        clients: AllowedClients | None,
    ) -> None:
        """`clients` are those of CURVE, None if any may connect. Before a socket is bound."""
        super().__init__(context, log=logging.getLogger("quire.zap"))
        self._connections = connections
        for domain in connections:
            if clients:
                self.configure_curve_callback(domain, clients)
            else:
                self.configure_curve(domain, zmq.auth.CURVE_ALLOW_ANY)

    async def handle_zap_message(self, msg: list[bytes]) -> None:
        """Answer one request: refuse it if its socket is full."""
        if len(msg) >= _FRAMES and self._is_full(msg[_DOMAIN].decode(errors="replace")):
            self._send_zap_reply(msg[_REQUEST_ID], _TRY_AGAIN, b"too many connections")
        else:
            await super().handle_zap_message(msg)

    def _is_full(self, domain: str) -> bool:
        if (connections := self._connections.get(domain)) is None:
            return True
        connections.update()
        return connections.count > MOST_CONNECTIONS
