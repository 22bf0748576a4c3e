"""The simulated gateway, with its clients."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from quire.v1 import engine_pb2, engine_pb2_grpc
from services.gateway.access.admission import AdmissionControl
from services.gateway.access.namespace import Namespace
from services.gateway.access.slow_clients import SlowClients
from services.gateway.access.tenants import Tenants
from services.gateway.attempts import FailoverLimits
from services.gateway.fleet.discovery import ServiceAddresses
from services.gateway.fleet.dispatch import Dispatcher, Placement
from services.gateway.fleet.engine_events import FailoverReason
from services.gateway.fleet.engine_link import LinkOptions
from services.gateway.fleet.fleet import Fleet, ServedModel
from services.gateway.fleet.routing import Router, RoutingPolicy
from services.gateway.observe.observer import GatewayObserver
from services.gateway.request_handler import RequestHandler, RequestLimits
from services.runtime.tracing.spans import Tracing
from simulation.network.channel import SimulatedChannel
from simulation.network.connections import Network
from simulation.processes.engine import address_of
from simulation.processes.process import Process

# A kill every few milliseconds must not use up the failovers of a request: what counts is that none is lost.
_FAILOVER = FailoverLimits(failovers=1000, wait_seconds=100.0)
_TOKENS = 10**6
_SLOW_CLIENT_SECONDS = 1000.0
LINK_SECONDS = 15.0  # after which a gateway closes a link that carries nothing
_LINKS = LinkOptions(LINK_SECONDS, 10.0)
_RESOLVE_SECONDS = 3600.0
_ROUTER_BLOCKS = 64


@dataclass(frozen=True)
class GatewayLimits:
    """How many requests a gateway admits at a time."""

    requests: int = 1000


class WatchedDispatcher(Dispatcher):
    """Counts the engines that were lost with each request, and how often each was to be placed in a second."""

    def __init__(self, fleet: Fleet, router: Router, observer: GatewayObserver, clock: Callable[[], float]) -> None:
        """Start without a loss."""
        super().__init__(fleet, router, None, observer, clock)
        self._seconds = clock
        self.lost_engines = Counter[str]()
        self.placed = Counter[tuple[str, int]]()  # by request and second

    async def place(self, model: ServedModel, submission: engine_pb2.Submission, *choices: Any) -> Placement:
        """Count that the request is to be placed."""
        self.placed[submission.request_id, int(self._seconds())] += 1
        return await super().place(model, submission, *choices)

    def on_failover(self, model: str, request_id: str, engine_id: str, reason: FailoverReason) -> None:
        """Count a lost engine."""
        super().on_failover(model, request_id, engine_id, reason)
        self.lost_engines[request_id] += reason is FailoverReason.LOST


class GatewayProcess(Process):
    """A gateway of these engines."""

    def __init__(
        self, network: Network, clock: Callable[[], float], name: str, engines: Iterable[str], limits: GatewayLimits
    ) -> None:
        super().__init__(name, clock)
        self._network = network
        self._limits = limits
        self.loop.run(partial(self._open, clock, ",".join(map(address_of, engines))))

    def end(self) -> None:
        """End the process as SIGTERM does, after its requests."""
        self.ending = True
        self.start(self._end())

    async def _end(self) -> None:
        await self.handler.drain()
        self.exit = "it was ended"

    def _open(self, clock: Callable[[], float], engines: str) -> None:
        observer = GatewayObserver()
        links = replace(_LINKS, connect=self._connect)
        self.fleet = Fleet(ServiceAddresses.of(engines), _RESOLVE_SECONDS, links)
        router = Router(RoutingPolicy("prefix"), _ROUTER_BLOCKS)
        dispatcher = WatchedDispatcher(self.fleet, router, observer, clock)
        self.lost_engines, self.placed = dispatcher.lost_engines, dispatcher.placed
        limits = RequestLimits(
            AdmissionControl(self._limits.requests, _TOKENS),
            _FAILOVER,
            Tenants(clock),
            SlowClients(_SLOW_CLIENT_SECONDS, clock),
        )
        self.handler = RequestHandler(
            self.fleet, dispatcher, limits, Namespace(separate=False), observer, Tracing(), clock
        )
        self.start(self.fleet.run())

    @asynccontextmanager
    async def _connect(self, address: str) -> AsyncIterator["engine_pb2_grpc.EngineAsyncStub"]:
        async with SimulatedChannel(self._network, self.loop, address) as channel:
            yield engine_pb2_grpc.EngineStub(channel)  # type: ignore[call-overload]
