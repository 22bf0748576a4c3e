"""The gateway's bare server."""

import asyncio
from contextlib import suppress
from pathlib import Path

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from services import transport
from services.gateway import pinned_prompts
from services.gateway.admission import Admission
from services.gateway.engine_link import EngineLink
from services.gateway.front_desk import FrontDesk
from services.gateway.observer import GatewayObserver
from services.gateway.servicer import MOST_ADMIN_SECONDS, GatewayServicer, RequestParser
from services.gateway.settings import GatewaySettings
from services.gateway.slow_clients import SlowClients
from services.gateway.tokenizer import Tokenizer
from services.service import Readiness


class GatewayService:
    """Serves clients with one engine's model."""

    name = gateway_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name

    def __init__(self, settings: GatewaySettings, observer: GatewayObserver | None = None) -> None:
        """Make the server; it listens from `start` on, and is ready while the engine is there.

        `observer` hears of its work. Raises InvalidSetting when the file of prompts to pin is wrong.
        """
        self._settings = settings
        self._observer = observer or GatewayObserver()
        self._pinned_prompts = pinned_prompts.read(settings.pinned_prompts)
        self._link = EngineLink(
            settings.engine, settings.link_timeout_seconds, settings.max_buffered_tokens, self._observer
        )
        self._desk: FrontDesk | None = None
        self.readiness = Readiness()
        self.server = transport.server(transport.CLIENT_MESSAGE_BYTES, [RequestParser()])

    async def start(self) -> str:
        """Load the tokenizer from the model's folder and listen. Raises TokenizerLoadError or AddressUnavailable."""
        tokenizer = Tokenizer.load(Path(self._settings.model))
        clock = asyncio.get_running_loop().time
        admission = Admission(self._settings.max_requests, self._settings.max_queued_tokens)
        slow_clients = SlowClients(self._settings.slow_client_seconds, clock)
        self._desk = FrontDesk(self._link, tokenizer, admission, slow_clients, self._observer, clock)
        gateway_pb2_grpc.add_GatewayServicer_to_server(GatewayServicer(self._desk), self.server)
        address = transport.bind(self.server, self._settings.listen)
        await self.server.start()
        return address

    async def run(self) -> None:
        """Keep the link to the engine until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._link.run())
            tasks.create_task(self._follow())
            tasks.create_task(self._pin())
            if self._desk:
                tasks.create_task(self._desk.slow_clients.run())

    async def _pin(self) -> None:
        """Pin what the file says each time that the engine comes up: one that was restarted has lost it."""
        pinned_for = 0
        async for ready in self._link.readiness.changes():
            while ready and self._desk and self._link.readiness.ready and pinned_for != self._link.sessions:
                pinned_for = self._link.sessions  # it may come up again meanwhile
                await pinned_prompts.pin_all(self._desk, self._pinned_prompts, MOST_ADMIN_SECONDS)

    async def _follow(self) -> None:
        async for ready in self._link.readiness.changes():
            self.readiness.set(ready)

    async def drain(self) -> None:
        """Refuse new requests, and wait for those under way until the grace time is over."""
        self.readiness.retire()
        if self._desk:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._desk.drain(), self._settings.grace_seconds)

    async def stop(self) -> None:
        """Close the server; what is still under way is cancelled."""
        await self.server.stop(grace=0)
