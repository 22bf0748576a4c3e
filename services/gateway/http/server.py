"""Puts the HTTP front together."""

import ssl

from services.gateway.access.callers import ANYONE
from services.gateway.http.app import make_app
from services.gateway.http.json_request import Authenticate
from services.gateway.http.observed import ObservedApp, count_refusal
from services.gateway.observe.observer import GatewayObserver
from services.gateway.request_handler import RequestHandler
from services.gateway.settings import GatewaySettings
from services.runtime.http.connection import HttpLimits
from services.runtime.http.server import HttpServer
from services.runtime.service import Readiness


def http_server(
    handler: RequestHandler,
    settings: GatewaySettings,
    readiness: Readiness,
    observer: GatewayObserver,
    authenticate: Authenticate = lambda _: ANYONE,
    context: ssl.SSLContext | None = None,
) -> HttpServer:
    """Make the server of a gateway; with a context, its connections are encrypted."""
    app = ObservedApp(make_app(handler, readiness, authenticate), readiness, observer)
    limits = HttpLimits(settings.http_connections, settings.http_read_seconds, settings.http_write_seconds)
    return HttpServer(app, limits, context, lambda status: count_refusal(observer, status))
