"""The simulated processes: the product's own services on simulated loops, without files and sockets."""

import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine.run.loop import Engine
from engine.schedule.limits import Limits
from engine.schedule.request import Capacity
from engine.schedule.scheduler import Scheduler
from kvmanager import KVManager, PoolSpec
from quire.v1 import engine_pb2, engine_pb2_grpc, kvmanager_pb2_grpc
from services.engine.block_client import AttachRefused, BlockClient
from services.engine.driver import EngineDriver, Pause
from services.engine.guided.constraints import Constraints
from services.engine.observer import EngineObserver
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports
from services.engine.servicer import EngineServicer
from services.engine.startup.tokenizer_files import TokenizerFiles
from services.gateway.access.admission import AdmissionControl
from services.gateway.access.namespace import Namespace
from services.gateway.access.slow_clients import SlowClients
from services.gateway.access.tenants import Tenants
from services.gateway.attempts import FailoverLimits
from services.gateway.fleet.discovery import ServiceAddresses
from services.gateway.fleet.dispatch import Dispatcher
from services.gateway.fleet.engine_link import LinkOptions
from services.gateway.fleet.fleet import Fleet
from services.gateway.fleet.routing import Router, RoutingPolicy
from services.gateway.observe.observer import GatewayObserver
from services.gateway.request_handler import RequestHandler, RequestLimits
from services.kvmanager.observer import PoolObserver
from services.kvmanager.raw_request_interceptor import RawRequestInterceptor
from services.kvmanager.recorder import OperationsRecorder
from services.kvmanager.servicer import KVManagerServicer
from services.runtime.tracing.spans import Tracing
from services.wire.features import FEATURES
from simulation.event_loop import SimulatedLoop
from simulation.network import Network, SimulatedChannel, SimulatedServer
from tests.engine.fake_runner import FakeRunner

MODEL = "m"
VOCABULARY = 8
STOP = frozenset({0})
MANAGER = "kvmanager:1"


class Process:
    """A process: its loop, and for an engine its thread. `stopped` processes run nothing until they continue."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self.name = name
        self.loop = SimulatedLoop(clock)
        self.stopped = False
        self.exit: str | None = None  # why it has ended by itself

    @property
    def alive(self) -> bool:
        """Whether it exists."""
        return not self.loop.dead

    def can_run(self, now: float) -> bool:
        """Return whether something can run now, beside its callbacks."""
        del now
        return False

    def next_wake(self) -> float | None:
        """Return the time at which something can run, beside its callbacks."""
        return None

    def run(self) -> None:
        """Run what `can_run` reports."""


class ManagerProcess(Process):
    """The KV manager."""

    def __init__(self, network: Network, clock: Callable[[], float], epoch: int, lease_seconds: float) -> None:
        super().__init__("kvmanager", clock)
        self.manager = KVManager(epoch)
        self.server = SimulatedServer(self.loop, (RawRequestInterceptor(),))
        self.servicer = self.loop.run(
            lambda: KVManagerServicer(
                self.manager, PoolObserver(), clock, lease_seconds, OperationsRecorder("", 0)
            )
        )
        kvmanager_pb2_grpc.add_KVManagerServicer_to_server(self.servicer, self.server)  # type: ignore[arg-type]
        network.listen(MANAGER, self.server)
        self.loop.run(lambda: self.loop.create_task(self.servicer.run()))


@dataclass(frozen=True)
class PoolSize:
    """The size of an engine's pool, and how it schedules."""

    block_size: int = 2
    device_blocks: int = 12
    host_blocks: int = 4
    limits: Limits = field(default_factory=lambda: Limits(token_budget=16, max_sequences=6))
    context_tokens: int = 64

    def capacity(self) -> Capacity:
        """Return it as the scheduler's capacity."""
        return Capacity(self.context_tokens, VOCABULARY, self.block_size, self.device_blocks, self.host_blocks)


class EngineProcess(Process):
    """An engine whose model computes tokens from the contents of its blocks. Its thread runs turn by turn."""

    def __init__(
        self, network: Network, clock: Callable[[], float], engine_id: str, incarnation: int, size: PoolSize, folder: Path
    ) -> None:
        super().__init__(engine_id, clock)
        self.incarnation = incarnation
        self._clock = clock
        self._pause: Pause | None = None
        self._until: float | None = None
        self.server = SimulatedServer(self.loop)
        self.runner = FakeRunner(size.block_size, VOCABULARY)
        self.loop.run(partial(self._start, network, size, folder))

    def _start(self, network: Network, size: PoolSize, folder: Path) -> None:
        spec = PoolSpec(
            engine_id=self.name,
            incarnation=self.incarnation,
            model_fingerprint="f",
            block_size=size.block_size,
            device_blocks=size.device_blocks,
            host_blocks=size.host_blocks,
            model=MODEL,
            boot_id="simulated",
        )
        self.scheduler = Scheduler(size.capacity(), size.limits)
        reports = RequestReports(MODEL, self.name, Tracing())
        self.link = BlockClient(
            MANAGER,
            spec,
            lambda: self.driver.wake(),
            trace_parents=reports.trace_parents,
            connect=lambda: SimulatedChannel(network, self.loop, MANAGER),  # type: ignore[arg-type,return-value]
        )
        engine = Engine(self.scheduler, self.runner, self.link, self._clock)
        recorder = RequestsRecorder("")
        recorder.begin(self.scheduler, self.name)
        self.driver = EngineDriver(
            engine, STOP, 10.0, EngineObserver(), recorder, reports, clock=self._clock, wait=_already_sent
        )
        tokenizer = TokenizerFiles(folder)
        description = engine_pb2.GetEngineResponse(
            model=MODEL,
            engine_id=self.name,
            model_fingerprint="f",
            context_tokens=size.context_tokens,
            vocabulary_size=VOCABULARY,
            block_size=size.block_size,
            device_blocks=size.device_blocks,
            tokenizer_digest=tokenizer.digest(),
            max_sequences=size.limits.max_sequences,
            features=FEATURES,
        )
        servicer = EngineServicer(heartbeat_seconds=1.0)
        servicer.begin(self.driver, Constraints(folder, VOCABULARY, STOP), description, tokenizer)
        engine_pb2_grpc.add_EngineServicer_to_server(servicer, self.server)  # type: ignore[arg-type]
        network.listen(f"{self.name}:1", self.server)
        self.loop.create_task(self._attach())

    async def _attach(self) -> None:
        try:
            await self.link.run()
        except AttachRefused as refused:
            self.exit = str(refused)

    def can_run(self, now: float) -> bool:
        """Return whether the engine's thread can begin a turn."""
        if self._pause is None or self.driver.has_commands:
            return True
        return self._until is not None and self._until <= now

    def next_wake(self) -> float | None:
        """Return the time at which the thread's pause ends."""
        return self._until if self._pause is not None else None

    def run(self) -> None:
        """Run a turn."""
        self._pause = self.driver.turn()
        if self._pause is not None:
            seconds = self._pause.seconds
            self._until = None if seconds is None else self._clock() + seconds


class GatewayProcess(Process):
    """A gateway with its clients."""

    def __init__(
        self, network: Network, clock: Callable[[], float], name: str, engines: str, failovers: int = 1000
    ) -> None:
        super().__init__(name, clock)
        self._network = network
        self.loop.run(partial(self._start, clock, engines, failovers))

    def _start(self, clock: Callable[[], float], engines: str, failovers: int) -> None:
        observer = GatewayObserver()
        links = LinkOptions(15.0, 10.0, connect=self._connect)
        self.fleet = Fleet(ServiceAddresses.of(engines), 3600.0, links)
        dispatcher = Dispatcher(self.fleet, Router(RoutingPolicy("prefix"), 64), None, observer, clock)
        limits = RequestLimits(
            AdmissionControl(1000, 10**6),
            FailoverLimits(failovers, 600.0),
            Tenants(clock),
            SlowClients(1000.0, clock),
        )
        self.handler = RequestHandler(
            self.fleet, dispatcher, limits, Namespace(separate=False), observer, Tracing(), clock
        )
        self.loop.create_task(self.fleet.run())

    @asynccontextmanager
    async def _connect(self, address: str) -> AsyncIterator["engine_pb2_grpc.EngineAsyncStub"]:
        async with SimulatedChannel(self._network, self.loop, address) as channel:
            yield engine_pb2_grpc.EngineStub(channel)  # type: ignore[arg-type,misc]

    def start(self, client: Coroutine[Any, Any, None]) -> None:
        """Run a client on this process's loop."""
        self.loop.run(lambda: self.loop.create_task(client))


def _already_sent(sent: threading.Event, seconds: float) -> bool:
    """Return at once: the engine's thread cannot wait for its own loop in one thread."""
    del sent, seconds
    return True


