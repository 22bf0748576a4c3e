"""Puts the block map's server together."""

import ssl
from collections.abc import Callable

from kvmanager import KVManager
from services.kvmanager.pages.app import BlockMapApp
from services.runtime.http.connection import HttpLimits
from services.runtime.http.server import HttpServer

# A browser keeps six connections; this is a page for some people, not for clients.
_CONNECTIONS = 128
_READ_SECONDS = 10.0
_WRITE_SECONDS = 30.0


def block_map_server(
    manager: KVManager, clock: Callable[[], float], *, local: bool, context: ssl.SSLContext | None = None
) -> HttpServer:
    """Make the server of a KV manager's pages; with a context, its connections are encrypted.

    `local` says that it is to be reached from this machine alone.
    """
    limits = HttpLimits(_CONNECTIONS, _READ_SECONDS, _WRITE_SECONDS)
    return HttpServer(BlockMapApp(manager, clock, local=local).asgi, limits, context)
