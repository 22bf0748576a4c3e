"""The gateway's server, without command line and metrics page."""

import asyncio
import logging
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services.gateway import pinned_prompts
from services.gateway.access.admission import AdmissionControl
from services.gateway.access.auth_interceptor import AuthInterceptor
from services.gateway.access.authentication import Authentication
from services.gateway.access.callers import Caller
from services.gateway.access.namespace import Namespace
from services.gateway.access.slow_clients import SlowClients
from services.gateway.access.tenants import Tenants
from services.gateway.administration import ADMIN_TIMEOUT_SECONDS, FleetAdministration
from services.gateway.attempts import FailoverLimits
from services.gateway.dialects.selection import DialectSelection
from services.gateway.fleet.discovery import ServiceAddresses
from services.gateway.fleet.dispatch import Dispatcher
from services.gateway.fleet.engine_link import Connect, EngineLink, LinkOptions
from services.gateway.fleet.fleet import Fleet
from services.gateway.fleet.prefix_lookup import PrefixLookup
from services.gateway.fleet.routing import Router, RoutingPolicy
from services.gateway.fleet.token_pacing import TokenPacing
from services.gateway.observe.observer import GatewayObserver
from services.gateway.observe.observers import GatewayObservers
from services.gateway.observe.request_log import RequestLog
from services.gateway.observe.tenant_usage import TenantUsage
from services.gateway.request_handler import RequestHandler, RequestLimits
from services.gateway.servicer import GatewayServicer, ParsingInterceptor
from services.gateway.settings import CHAT, GatewaySettings
from services.runtime import transport
from services.runtime.errors import RejectionReason, Unauthenticated
from services.runtime.service import Readiness
from services.runtime.tls import ServerContext, link_tls, listening_files, server_tls
from services.runtime.tracing.export import create_tracing

# Time to send the last statuses, and UNAVAILABLE to calls that have just arrived: clients do not retry cancelled calls.
_STOP_GRACE_SECONDS = 1.0
_PRUNE_SECONDS = 5.0

if TYPE_CHECKING:  # the HTTP packages are imported only if http_listen is set
    from fastapi import FastAPI

    from services.runtime.http.server import HttpServer

log = logging.getLogger("quire.gateway")


class GatewayService:
    """Serves clients over gRPC and HTTP."""

    name = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name

    def __init__(
        self, settings: GatewaySettings, observer: GatewayObserver | None = None, connect: Connect | None = None
    ) -> None:
        """Build the server; `start` opens its ports. It is ready while an engine accepts requests.

        `observer` receives the events of its requests. `connect` replaces the channels to engines. Raises
        InvalidSetting for an invalid file, for an exposure without API keys or TLS, and for traces that cannot be
        exported.
        """
        settings.check_exposure()
        self._settings = settings
        self._tls, links_tls = server_tls(settings), link_tls(settings)
        self._http_tls = ServerContext(listening_files(settings)) if settings.tls_certificate else None
        tenants = Tenants(time.monotonic)
        namespace = Namespace(separate=bool(settings.api_keys) and settings.prefixes == "tenant")
        self._authentication = Authentication(settings.api_keys, tenants)
        self._pinned_prompts = pinned_prompts.read(settings.pinned_prompts)
        clock = asyncio.get_running_loop().time
        usage = TenantUsage()
        self._observer = GatewayObservers(RequestLog(), usage, observer or GatewayObserver())
        self._observer.on_tenants(usage.stats, tenants.rejections)
        managers = ServiceAddresses.of(settings.kvmanager, "kvmanager") if settings.kvmanager else None
        self._lookup = PrefixLookup(managers, clock, links_tls) if managers else None
        links = LinkOptions(
            timeout_seconds=settings.link_timeout_seconds,
            load_window_seconds=settings.routing_window_seconds,
            tls=links_tls,
            max_buffered_tokens=settings.max_buffered_tokens,
            pacing=TokenPacing(settings.stream_interval, transport.waited_seconds()),
            observer=self._observer,
            connect=connect,
        )
        selection = DialectSelection(settings.tool_call_parser, settings.reasoning_parser)
        self._fleet = Fleet(ServiceAddresses.of(settings.engines), settings.discovery_seconds, links, selection)
        router = Router(RoutingPolicy(settings.routing), settings.routing_slack_tokens)
        dispatcher = Dispatcher(self._fleet, router, self._lookup, self._observer, clock)
        failover = FailoverLimits(settings.failovers, settings.failover_seconds)
        admission = AdmissionControl(settings.max_requests, settings.max_queued_tokens)
        limits = RequestLimits(admission, failover, tenants, SlowClients(settings.slow_client_seconds, clock))
        self._tracing = create_tracing("gateway", settings.otlp_endpoint, settings.trace_sample_ratio)
        self._handler = RequestHandler(self._fleet, dispatcher, limits, namespace, self._observer, self._tracing, clock)
        self._administration = FleetAdministration(self._fleet, self._handler, namespace)
        self._servicer = GatewayServicer(self._handler, self._administration, self.authenticate)
        self._http: HttpServer | None = None
        self.readiness = Readiness()
        self.server = transport.server(
            transport.CLIENT_MESSAGE_BYTES,
            [AuthInterceptor(self.authenticate), ParsingInterceptor()],
            connection_age_seconds=settings.max_connection_age_seconds,
        )

    def authenticate(self, authorization: str | None) -> Caller:
        """Return the caller for a value of `authorization`, over gRPC or HTTP. Raises Unauthenticated."""
        try:
            return self._authentication.authenticate(authorization)
        except Unauthenticated:
            self._observer.on_rejected("", RejectionReason.UNAUTHENTICATED)
            raise

    def app(self) -> "FastAPI":
        """Return the application of the HTTP API, for callers in this process."""
        from services.gateway.http.app import make_app

        return make_app(self._handler, self._administration, self.readiness)

    async def start(self) -> str:
        """Listen, and return the gRPC address. Raises AddressUnavailable."""
        gateway_pb2_grpc.add_GatewayServicer_to_server(self._servicer, self.server)
        address = transport.bind(self.server, self._settings.listen, self._tls)
        await self.server.start()
        if self._settings.http_listen:
            await self._start_http()
        return address

    async def _start_http(self) -> None:
        from services.gateway.http.server import http_server

        context = self._http_tls.context if self._http_tls else None
        self._http = http_server(
            self._handler,
            self._administration,
            self._settings,
            self.readiness,
            self._observer,
            self.authenticate,
            context,
            self._lookup,
        )
        url = await self._http.start(self._settings.http_listen)
        log.info("gateway listens for HTTP at %s", url)
        if self._settings.pages == CHAT:
            log.info("chat page at %s/chat/", url)

    async def run(self) -> None:
        """Maintain the links to engines, reload changed files, and prune old state, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._authentication.reload_on_change())
            tasks.create_task(self._fleet.run())
            if self._lookup:
                tasks.create_task(self._lookup.run(self._settings.discovery_seconds))
            tasks.create_task(self._mirror_readiness())
            tasks.create_task(self._pin())
            tasks.create_task(self._handler.slow_clients.run())
            tasks.create_task(self._prune())
            if self._http_tls:
                tasks.create_task(self._http_tls.reload_on_change())

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(_PRUNE_SECONDS)
            self._handler.prune(asyncio.get_running_loop().time())

    async def _mirror_readiness(self) -> None:
        async for ready in self._fleet.readiness.changes():
            self.readiness.set(ready)

    async def _pin(self) -> None:
        """Pin the file's prompts at each engine that connects; a restarted engine has lost its pins."""
        pinned_for: dict[EngineLink, int] = {}
        while self._pinned_prompts:
            change = asyncio.create_task(self._fleet.wait_for_change())
            links = self._fleet.links()
            pinned_for = {link: pinned_for.get(link, 0) for link in links}
            for link in links:
                if pinned_for[link] != link.sessions:
                    pinned_for[link] = link.sessions
                    await pinned_prompts.pin_all(
                        self._administration, link, self._pinned_prompts, ADMIN_TIMEOUT_SECONDS
                    )
            await change

    async def drain(self) -> None:
        """Reject new requests, and wait for those in flight, at most for the grace time; end those that are left."""
        self.readiness.retire()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wait_until_idle(), self._settings.grace_seconds)
        self._servicer.unfinished.end()

    async def _wait_until_idle(self) -> None:
        await self._handler.drain()
        await self._servicer.unfinished.finished()
        if self._http:  # it sends a response after its generation has ended
            await self._http.finish_requests()

    async def stop(self) -> None:
        """Close the servers."""
        if self._http:
            await self._http.stop()
        await self.server.stop(grace=_STOP_GRACE_SECONDS)
        if self._lookup:
            await self._lookup.close()
        await asyncio.to_thread(self._tracing.close)
