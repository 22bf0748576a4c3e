"""Runs the engine's loop on a thread of its own, and carries requests in and outputs out.

The thread is the only one that touches the engine. Others post commands to it; it hands outputs to the event loop.
"""

import asyncio
import logging
import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from engine.run.loop import Engine, StepTimes
from engine.schedule.request import Failure
from quire.v1 import engine_pb2
from services.engine.administration import Administration
from services.engine.gateway_link import GatewayLink
from services.engine.gateway_requests import Arrival, GatewayRequests
from services.engine.manager_monitor import ManagerMonitor
from services.engine.observer import EngineFigures, EngineObserver, StepFigures
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports

_POLL_SECONDS_WITHOUT_KVMANAGER = 0.2

log = logging.getLogger("quire.engine")


class EngineDriver:
    """Owns an engine. `run` is the thread's body; every other public method may be called from the event loop."""

    def __init__(
        self,
        engine: Engine,
        eos_token_ids: frozenset[int],
        seconds_without_kvmanager: float,
        observer: EngineObserver,
        recorder: RequestsRecorder,
        reports: RequestReports,
    ) -> None:
        self.reports = reports
        self._engine = engine
        self._scheduler = engine.scheduler
        self._administration = Administration(engine.scheduler)
        self._requests = GatewayRequests(engine.scheduler, eos_token_ids, recorder, reports, self._call)
        self._manager = ManagerMonitor(seconds_without_kvmanager, time.monotonic())
        self._observer = observer
        self._figures = self._count()
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = self._abandoned = False
        self._waited = 0.0  # seconds for the KV manager since the last step
        self._empty = asyncio.Event()
        self._ended = asyncio.Event()

    def watch(self, changed: Callable[[], None]) -> None:
        """Have this called on the event loop whenever `without_kvmanager` has changed."""
        self._manager.watch(lambda: self._call(changed))

    @property
    def without_kvmanager(self) -> bool:
        """Whether there is no KV manager for longer than requests wait: each fails."""
        return self._manager.gone

    @property
    def steps(self) -> int:
        """Steps executed so far."""
        return self._scheduler.totals.steps

    @property
    def figures(self) -> EngineFigures:
        """Requests and totals as of the last turn."""
        return self._figures

    @property
    def request_blocks(self) -> int:
        """Blocks that one request can have at most."""
        return self._scheduler.capacity.unpinned_blocks

    async def administer(self, request: engine_pb2.EngineAdminRequest) -> engine_pb2.EngineAdminResponse:
        """Change what is pinned; return when it is done, and what is pinned then. Raises a ServiceError."""
        answer: asyncio.Future[engine_pb2.EngineAdminResponse] = self._loop.create_future()
        self._commands.put(lambda: self._administration.begin(request, answer, time.monotonic()))
        return await answer

    def submit(self, link: GatewayLink, arrival: Arrival) -> None:
        """Queue a request; a refusal comes as output."""
        self._commands.put(lambda: self._requests.submit(link, arrival))

    def cancel(self, link: GatewayLink, cancel: engine_pb2.Cancel) -> None:
        """End a request of this link."""
        self._commands.put(lambda: self._requests.cancel(link, cancel))

    def drop(self, link: GatewayLink) -> None:
        """End all requests of a link that is gone."""
        self._commands.put(lambda: self._requests.drop(link))

    def wake(self) -> None:
        """Let the loop look at the block manager's answers."""
        self._commands.put(lambda: None)

    async def drain(self) -> None:
        """Refuse new requests, and return when none is live."""
        self._commands.put(self._scheduler.requests.drain)
        await self._empty.wait()

    async def stop(self) -> None:
        """Let `run` return after its present turn, with an end for every live request; wait until it has."""
        self._commands.put(lambda: self._stop(abandoned=False))
        await self._ended.wait()

    async def abandon(self) -> None:
        """Let `run` return after its present turn, and wait until it has.

        Live requests get no end: their links break, by which gateways see that the engine failed.
        """
        self._commands.put(lambda: self._stop(abandoned=True))
        await self._ended.wait()

    def run(self) -> None:
        """Turn the engine until stopped; sleep while a turn moves nothing."""
        try:
            while not self._stopping:
                self._turn()
            if not self._abandoned:
                self._scheduler.requests.cancel_all()
                self._requests.deliver(self._scheduler.take_outputs())
        finally:
            self._call(self._ended.set)

    # On the engine's thread.

    def _turn(self) -> None:
        if self._take_commands():
            self._figures = self._count()
        turn = self._engine.turn()
        turned, computed = time.monotonic(), self._figures.totals.computed_tokens
        self._watch_manager()  # after the turn, which has taken in what became of it
        if (failure := self._engine.take_failure()) is not None:
            log.error("a step failed", exc_info=failure)
        self._figures = self._count()  # they go with the outputs
        self._requests.deliver([*turn.outputs, *self._scheduler.take_outputs()])
        if turn.step is not None:
            self._observe(turn.step, self._figures.totals.computed_tokens - computed, time.monotonic() - turned)
        self._administration.look()
        if self._scheduler.requests.draining and self._scheduler.empty:
            self._call(self._empty.set)
        if not turn.progressed:
            self._sleep()

    def _take_commands(self) -> bool:
        """Do what was asked for; return whether anything was."""
        any_were = False
        while not self._commands.empty():
            self._commands.get()()
            any_were = True
        return any_were

    def _count(self) -> EngineFigures:
        scheduler = self._scheduler
        return EngineFigures(
            scheduler.running,
            scheduler.waiting,
            replace(scheduler.totals),
            scheduler.uncomputed_tokens,
            scheduler.available_blocks,
            deferred=scheduler.deferred if self._engine.blocks.ready else scheduler.waiting,
        )

    def _observe(self, times: StepTimes, tokens: int, delivering: float) -> None:
        waited, self._waited = self._waited, 0.0
        publish = times.publish + delivering
        self._observer.on_step(StepFigures(tokens, times.ran, times.plan, waited, times.forward, times.sample, publish))

    def _sleep(self) -> None:
        waits = self._manager.counts_down or (self._manager.gone and not self._scheduler.empty)
        begun, any_live = time.monotonic(), self._scheduler.running or self._scheduler.waiting
        try:
            command = self._commands.get(timeout=_POLL_SECONDS_WITHOUT_KVMANAGER if waits else None)
        except queue.Empty:
            return
        finally:
            self._waited += time.monotonic() - begun if any_live else 0.0
        command()

    def _watch_manager(self) -> None:
        if self._manager.look(self._engine.blocks.ready, time.monotonic()):
            detail = f"the engine has been without its KV manager for more than {self._manager.patience:g} s"
            self._scheduler.requests.fail_all(Failure.BLOCK_MANAGER, detail)

    def _stop(self, *, abandoned: bool) -> None:
        self._stopping, self._abandoned = True, abandoned or self._abandoned

    def _call(self, callback: Callable[[], None]) -> None:
        """Call on the event loop. When that is closed, nobody waits for it any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)
