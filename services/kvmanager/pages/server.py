"""The block map's HTTP server."""

import ssl
from collections.abc import Callable

from kvmanager import KVManager
from services.kvmanager.pages.app import BlockMapApp
from services.runtime.http.connection import HttpLimits
from services.runtime.http.server import HttpServer

# A browser uses six connections, and few people open this page at a time.
_CONNECTIONS = 128
_READ_SECONDS = 10.0
_WRITE_SECONDS = 30.0


def block_map_server(
    manager: KVManager, clock: Callable[[], float], *, local: bool, context: ssl.SSLContext | None = None
) -> HttpServer:
    """Create the server of a KV manager's pages, with TLS if `context` is given.

    If `local`, it serves only requests to this machine's own names.
    """
    limits = HttpLimits(_CONNECTIONS, _READ_SECONDS, _WRITE_SECONDS)
    return HttpServer(BlockMapApp(manager, clock, local=local).asgi, limits, context)
