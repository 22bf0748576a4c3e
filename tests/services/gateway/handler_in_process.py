"""A gateway's request handler on a test's event loop, with real engines that compute nothing.

Tests read the resources that requests hold from the parts of the handler.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from bench.loads.null_engine import NullOptions, assemble
from quire.v1 import gateway_pb2
from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.gateway.access.admission import AdmissionControl
from services.gateway.access.api_keys import TenantLimits
from services.gateway.access.callers import Caller, Origin
from services.gateway.access.namespace import Namespace
from services.gateway.access.slow_clients import SlowClients
from services.gateway.access.tenants import Tenants
from services.gateway.attempts import FailoverLimits
from services.gateway.fleet.discovery import ServiceAddresses
from services.gateway.fleet.dispatch import Dispatcher
from services.gateway.fleet.engine_link import LinkOptions
from services.gateway.fleet.fleet import Fleet
from services.gateway.fleet.prefix_lookup import PrefixLookup
from services.gateway.fleet.request_stream import RequestStream
from services.gateway.fleet.routing import Router, RoutingPolicy
from services.gateway.observe.observer import GatewayObserver, RequestInfo, RequestObserver, RequestProgress
from services.gateway.observe.observers import GatewayObservers
from services.gateway.observe.request_log import RequestLog
from services.gateway.observe.tenant_usage import TenantUsage
from services.gateway.request_handler import RequestHandler, RequestLimits
from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings
from services.runtime.service import Service
from services.runtime.tracing.spans import Tracing
from tests.running_quire import CALL_SECONDS

MODEL = "m"
ACME = Origin(Caller("acme", operator=False))
# Far more than the tests use. The bucket does not refill, because its clock is constant.
TOKENS = 10**12


@asynccontextmanager
async def running_service(service: Service) -> AsyncIterator[str]:
    """Run a service in this process, and yield its address."""
    address = await service.start()
    running = asyncio.create_task(service.run())
    try:
        yield address
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await service.stop()


@asynccontextmanager
async def null_engine(
    folder: Path,
    model: Path,
    name: str,
    options: NullOptions,
    device_blocks: int = 1024,
    model_name: str = MODEL,
    listen: str = "",
) -> AsyncIterator[str]:
    """Run an engine until it is ready, and yield its address, by default `unix:{folder}/{name}.sock`."""
    settings = EngineSettings(
        listen=listen or f"unix:{folder}/{name}.sock",
        kvmanager=f"unix:{folder}/kvmanager.sock",
        model=str(model),
        model_name=model_name,
        engine_id=name,
        device_blocks=device_blocks,
        heartbeat_seconds=0.2,
    )
    service = EngineService(settings, None, partial(assemble, options))
    async with running_service(service) as address:
        await service.readiness.wait()
        yield address


def kv_manager(folder: Path) -> AbstractAsyncContextManager[str]:
    """Run a KV manager at `folder/kvmanager.sock`."""
    return running_service(KVManagerService(KVManagerSettings(listen=f"unix:{folder}/kvmanager.sock", map_listen="")))


class Events(GatewayObserver, RequestObserver):
    """Collects the names of a request's events in order, and its progress."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.at_submission: Callable[[], None] = lambda: None
        self.progress: RequestProgress | None = None

    def on_request(self, request: RequestInfo) -> RequestObserver:
        self.names.clear()
        self.progress = None
        return self

    def on_admitted(self, request_id: str) -> None:
        self.names.append("admitted")

    def on_prepared(self, progress: RequestProgress) -> None:
        self.names.append("prepared")
        self.progress = progress

    def on_submitted(self, progress: RequestProgress) -> None:
        self.names.append("submitted")
        self.at_submission()

    def on_started(self, started: gateway_pb2.Started) -> None:
        self.names.append("started")

    def on_tokens(self, sample: int, count: int, now: float) -> None:
        self.names.append("tokens")

    def on_ended(self, finished: gateway_pb2.Finished, now: float) -> None:
        self.names.append("ended")

    def on_failed(self, error: BaseException, now: float) -> None:
        self.names.append("failed")


class HandlerInProcess:
    """A request handler and its parts."""

    def __init__(self, addresses: str, kvmanager: str, observer: GatewayObserver) -> None:
        clock = asyncio.get_running_loop().time
        self.events, self.usage = Events(), TenantUsage()
        observers = GatewayObservers(observer, RequestLog(), self.usage, self.events)
        options = LinkOptions(CALL_SECONDS, 60.0, observer=observers)
        self.fleet = Fleet(ServiceAddresses.of(addresses), 60.0, options)
        self.lookup = PrefixLookup(ServiceAddresses.of(kvmanager), clock)
        self.admission = AdmissionControl(100, TOKENS)
        self.tenants = Tenants(lambda: 0.0)
        self.tenants.set_limits({"acme": TenantLimits(10, TOKENS)})
        self.slow_clients = SlowClients(CALL_SECONDS, clock)
        limits = RequestLimits(self.admission, FailoverLimits(3, CALL_SECONDS), self.tenants, self.slow_clients)
        dispatcher = Dispatcher(
            self.fleet, Router(RoutingPolicy.PREFIX, slack_tokens=16384), self.lookup, observers, clock
        )
        namespace = Namespace(separate=True)
        self.handler = RequestHandler(self.fleet, dispatcher, limits, namespace, observers, Tracing(), clock)

    async def wait_for_engines(self, count: int) -> None:
        async with asyncio.timeout(CALL_SECONDS):
            while sum(link.accepts_requests for link in self.fleet.links()) < count:
                await self.fleet.wait_for_change()

    async def assert_nothing_held(self, task: "asyncio.Task[object]") -> None:
        """Check that the request of this task has released all its resources at the gateway and its engine."""
        assert self.handler._live_ids == set()
        assert (self.admission.requests, self.admission.queued_tokens(MODEL)) == (0, 0)
        assert self.admission._requests.level == 0
        assert self.tenants._running == {}
        assert self.slow_clients._streams == set()
        assert self.fleet.model(MODEL).in_flight == 0
        assert [link for link in self.fleet.links() if not link.idle] == []
        assert _timeouts(task) == []
        assert _deadlines() == []
        self._assert_accounted()
        async with asyncio.timeout(CALL_SECONDS):
            while any(link._requests._released for link in self.fleet.links()):
                await asyncio.sleep(0.002)  # the engine has not reported the end yet

    def _assert_accounted(self) -> None:
        """Check that the tokens taken from the bucket are those counted for tenants."""
        (bucket,) = self.tenants._buckets.values()
        used = sum((Counter(one.tokens) for one in self.usage.stats()), Counter[str]())
        assert sum(one.running for one in self.usage.stats()) == 0
        assert used["computed"] + used["cached"] + used["generated"] == TOKENS - bucket._tokens


def _timeouts(task: "asyncio.Task[object]") -> list[object]:
    return [one for one in _owners_of_timers() if isinstance(one, asyncio.Timeout) and one._task is task]  # type: ignore[attr-defined]


def _deadlines() -> list[object]:
    return [one for one in _owners_of_timers() if isinstance(one, RequestStream)]


def _owners_of_timers() -> list[object]:
    scheduled = [one for one in asyncio.get_running_loop()._scheduled if not one.cancelled()]  # type: ignore[attr-defined]
    return [getattr(handle._callback, "__self__", None) for handle in scheduled]


@asynccontextmanager
async def running_handler(
    folder: Path, addresses: str, observer: GatewayObserver, engines: int
) -> AsyncIterator[HandlerInProcess]:
    """Run a handler with the KV manager of `folder`; it is linked to this number of engines."""
    one = HandlerInProcess(addresses, f"unix:{folder}/kvmanager.sock", observer)
    running = asyncio.create_task(one.fleet.run())
    try:
        await one.wait_for_engines(engines)
        yield one
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await one.lookup.close()


@asynccontextmanager
async def handler_in_process(
    folder: Path,
    model: Path,
    observer: GatewayObserver | None = None,
    through: tuple[str, ...] = (),
    seconds_per_token: float = 20e-6,
    fingerprints: tuple[str, str] = ("nothing", "nothing"),
) -> AsyncIterator[HandlerInProcess]:
    """Run a handler with two engines, linked at their own addresses or `through` others."""
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(kv_manager(folder))
        for name, fingerprint in zip(("one", "two"), fingerprints, strict=True):
            options = NullOptions(16384, 384, 100, seconds_per_token * 1e6, fingerprint)
            await stack.enter_async_context(null_engine(folder, model, name, options))
        addresses = ",".join(through or (f"unix:{folder}/one.sock", f"unix:{folder}/two.sock"))
        yield await stack.enter_async_context(running_handler(folder, addresses, observer or GatewayObserver(), 2))
