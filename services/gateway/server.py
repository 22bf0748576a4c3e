"""The gateway's bare server."""

import asyncio
from contextlib import suppress

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services import transport
from services.gateway import pinned_prompts
from services.gateway.administration import Administration
from services.gateway.discovery import Places
from services.gateway.dispatch import Dispatcher
from services.gateway.engine_link import EngineLink
from services.gateway.fleet import Fleet, LinkOptions
from services.gateway.front_desk import DeskLimits, FrontDesk
from services.gateway.generation import FailoverLimits
from services.gateway.observer import GatewayObserver
from services.gateway.prefix_lookup import PrefixLookup
from services.gateway.routing import Policy, Router
from services.gateway.servicer import MOST_ADMIN_SECONDS, GatewayServicer, RequestParser
from services.gateway.settings import GatewaySettings
from services.service import Readiness


class GatewayService:
    """Serves clients with the models of its engines."""

    name = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name

    def __init__(self, settings: GatewaySettings, observer: GatewayObserver | None = None) -> None:
        """Make the server; it listens from `start` on, and is ready while an engine takes requests.

        `observer` hears of its work. Raises InvalidSetting when the file of prompts to pin is wrong.
        """
        self._settings = settings
        self._pinned_prompts = pinned_prompts.read(settings.pinned_prompts)
        clock = asyncio.get_running_loop().time
        observer = observer or GatewayObserver()
        self._lookup = PrefixLookup(settings.kvmanager, clock) if settings.kvmanager else None
        self._fleet = Fleet(Places.of(settings.engines), _link_options(settings))
        router = Router(Policy(settings.routing), settings.routing_slack_tokens)
        dispatcher = Dispatcher(self._fleet, router, self._lookup, observer, clock)
        self._desk = FrontDesk(self._fleet, dispatcher, _desk_limits(settings), observer, clock)
        self._administration = Administration(self._fleet, self._desk)
        self.readiness = Readiness()
        self.server = transport.server(transport.CLIENT_MESSAGE_BYTES, [RequestParser()])

    async def start(self) -> str:
        """Listen. Raises AddressUnavailable."""
        servicer = GatewayServicer(self._desk, self._administration)
        gateway_pb2_grpc.add_GatewayServicer_to_server(servicer, self.server)
        address = transport.bind(self.server, self._settings.listen)
        await self.server.start()
        return address

    async def run(self) -> None:
        """Keep the links to the engines until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._fleet.run())
            tasks.create_task(self._follow())
            tasks.create_task(self._pin())

    async def _follow(self) -> None:
        async for ready in self._fleet.readiness.changes():
            self.readiness.set(ready)

    async def _pin(self) -> None:
        """Pin what the file says at each engine that comes up: one that was restarted has lost it."""
        pinned_for: dict[EngineLink, int] = {}
        while self._pinned_prompts:
            change = asyncio.create_task(self._fleet.wait_for_change())
            for link in self._fleet.links():
                if pinned_for.get(link) != link.sessions:
                    pinned_for[link] = link.sessions
                    await pinned_prompts.pin_all(self._administration, link, self._pinned_prompts, MOST_ADMIN_SECONDS)
            await change

    async def drain(self) -> None:
        """Refuse new requests, and wait for those under way until the grace time is over."""
        self.readiness.retire()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._desk.drain(), self._settings.grace_seconds)

    async def stop(self) -> None:
        """Close the server; what is still under way is cancelled."""
        await self.server.stop(grace=0)
        if self._lookup:
            await self._lookup.close()


def _link_options(settings: GatewaySettings) -> LinkOptions:
    return LinkOptions(settings.discovery_seconds, settings.link_timeout_seconds, settings.routing_window_seconds)


def _desk_limits(settings: GatewaySettings) -> DeskLimits:
    return DeskLimits(settings.max_requests, FailoverLimits(settings.failovers, settings.failover_seconds))
