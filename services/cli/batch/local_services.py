"""An engine, the KV manager's core and a gateway in this process: no connections, and no idle waits between them."""

import asyncio
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from blocks import Step, StepResult
from kvmanager import KVManager, Ledger, PoolSpec
from services.cli.batch.endpoints import Endpoint, InProcess
from services.cli.batch.engine_stub import EngineStub
from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.gateway.server import GatewayService
from services.gateway.settings import GatewaySettings

# Between steps the engine's thread waits at most this long for the thread that reads requests and writes answers.
_SWITCH_SECONDS = 0.0005
# The window bounds the requests, so the gateway and the engine refuse none.
_NO_LIMIT = 2**31 - 1
# Nor is anything of this process lost by silence: it was stopped (Ctrl-Z), or the machine is busy. Ten years.
_NO_TIMEOUT = 10 * 365 * 86400.0

Result = TypeVar("Result")


class CoreBlocks:
    """Answers block steps at once, on the engine's thread. See services.engine.startup.parts.BlockLink."""

    sessions = 1
    ready = True

    def __init__(self, spec: PoolSpec, _wake: Callable[[], None], *, ledger: Ledger) -> None:
        """Attach the pool. The engine needs no wake: an answer is there before its next turn."""
        self._manager = KVManager(1, ledger)
        self._session = self._manager.attach(spec)
        self._answers: deque[StepResult] = deque()
        self.attached, self.detached = asyncio.Event(), asyncio.Event()
        self.attached.set()

    @property
    def usage(self) -> float:
        """Share of the pool's device blocks that are held, 0 to 1, in the kind that has the least room."""
        return self._session.pool.usage

    def send(self, step: Step) -> None:
        """Apply a block step."""
        self._answers.append(self._manager.apply(self._session, step).result)

    def receive(self) -> StepResult | None:
        """Return the next answer, if any."""
        return self._answers.popleft() if self._answers else None

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Detach the pool."""
        self.attached.clear()
        self.detached.set()


async def with_engine(
    settings: EngineSettings, work: Callable[[Endpoint], Awaitable[Result]], ledger: Ledger
) -> Result:
    """Load the model, do the work, and stop; the ledger gets its events. Raises the error that stopped the engine."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    engine = EngineService(replace(settings, max_waiting=_NO_LIMIT), attachment=partial(CoreBlocks, ledger=ledger))
    gateway = GatewayService(_gateway_settings(), connect=EngineStub(engine.servicer).connect)
    services = [asyncio.create_task(engine.run())]
    try:
        await _result(engine.readiness.wait(), services)
        services.append(asyncio.create_task(gateway.run()))
        await _result(gateway.readiness.wait(), services)
        return await _result(work(InProcess(gateway.app())), services)
    finally:
        for service in services:
            service.cancel()
        await asyncio.gather(*services, return_exceptions=True)
        await gateway.stop()
        await engine.stop()


def _gateway_settings() -> GatewaySettings:
    return GatewaySettings(
        http_listen="",
        engines="unix:run-batch",  # a name for logs
        routing="round-robin",
        failovers=0,
        max_requests=_NO_LIMIT,
        max_queued_tokens=_NO_LIMIT,
        link_timeout_seconds=_NO_TIMEOUT,
        slow_client_seconds=_NO_TIMEOUT,
    )


async def _result(work: Awaitable[Result], services: list["asyncio.Task[None]"]) -> Result:
    """Return the result of the work. Raises the error of a service that ends before."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, *services}, return_when=asyncio.FIRST_COMPLETED)
        for service in services:
            if service.done():
                service.result()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
