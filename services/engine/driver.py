"""Runs the engine's loop on its own thread, and carries requests in and outputs out.

Only this thread touches the engine. Other threads queue commands for it; it posts outputs to the event loop.
"""

import asyncio
import logging
import queue
import time
from collections.abc import Callable

from engine.run.loop import Engine, StepTimes
from engine.schedule.request import Failure
from engine.schedule.stats import SchedulerTotals
from quire.v1 import engine_pb2
from services.engine.administration import Administration
from services.engine.gateway_link import GatewayLink
from services.engine.gateway_requests import Arrival, GatewayRequests
from services.engine.manager_monitor import ManagerMonitor
from services.engine.observer import EngineObserver, EngineStats, StepStats
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports

_POLL_SECONDS_WITHOUT_KVMANAGER = 0.2

log = logging.getLogger("quire.engine")


class EngineDriver:
    """Owns an engine. `run` is the thread's body; all other public methods may be called from the event loop."""

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
        self._stats = self._count()
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopping = self._abandoned = False
        self._waited = 0.0  # seconds spent waiting for the KV manager since the last step
        self._empty = asyncio.Event()
        self._ended = asyncio.Event()

    def on_manager_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the event loop whenever `without_kvmanager` has changed."""
        self._manager.on_change(lambda: self._call(changed))

    @property
    def without_kvmanager(self) -> bool:
        """Return True if the KV manager has been disconnected for longer than requests wait for it."""
        return self._manager.lost

    @property
    def steps(self) -> int:
        """Number of executed steps."""
        return self._scheduler.totals.steps

    @property
    def stats(self) -> EngineStats:
        """Requests and totals at the end of the last turn."""
        return self._stats

    @property
    def request_blocks(self) -> int:
        """Maximum number of blocks that one request can have."""
        return self._scheduler.capacity.unpinned_blocks

    async def administer(self, request: engine_pb2.EngineAdminRequest) -> engine_pb2.EngineAdminResponse:
        """Execute an admin request, and return the pins after it. Raises ServiceError."""
        answer: asyncio.Future[engine_pb2.EngineAdminResponse] = self._loop.create_future()
        self._commands.put(lambda: self._administration.submit(request, answer, time.monotonic()))
        return await answer

    def submit(self, link: GatewayLink, arrival: Arrival) -> None:
        """Queue a request; a refusal is delivered as output."""
        self._commands.put(lambda: self._requests.submit(link, arrival))

    def cancel(self, link: GatewayLink, cancel: engine_pb2.Cancel) -> None:
        """Cancel a request of this link."""
        self._commands.put(lambda: self._requests.cancel(link, cancel))

    def drop(self, link: GatewayLink) -> None:
        """Cancel all requests of a disconnected link."""
        self._commands.put(lambda: self._requests.drop(link))

    def wake(self) -> None:
        """Wake the loop, because the block manager has an answer."""
        self._commands.put(lambda: None)

    async def drain(self) -> None:
        """Refuse new requests, and return when no request is live."""
        self._commands.put(self._scheduler.requests.drain)
        await self._empty.wait()

    async def stop(self) -> None:
        """Stop after the current turn, and end every live request. Return when the thread has finished."""
        self._commands.put(lambda: self._stop(abandoned=False))
        await self._ended.wait()

    async def abandon(self) -> None:
        """Stop after the current turn, and return when the thread has finished.

        Live requests get no end: their links break, so gateways see that the engine has failed.
        """
        self._commands.put(lambda: self._stop(abandoned=True))
        await self._ended.wait()

    def run(self) -> None:
        """Run the engine's turns until stopped; sleep after a turn without progress."""
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
        if self._execute_commands():
            self._stats = self._count()
        turn = self._engine.turn()
        turned, computed = time.monotonic(), self._stats.totals.computed_tokens
        self._watch_manager()  # after the turn, which has received the manager's last answers
        if (failure := self._engine.take_failure()) is not None:
            log.error("a step failed", exc_info=failure)
        self._stats = self._count()  # before the outputs are sent, so that both agree
        self._requests.deliver([*turn.outputs, *self._scheduler.take_outputs()])
        if turn.step is not None:
            self._observe(turn.step, self._stats.totals.computed_tokens - computed, time.monotonic() - turned)
        self._administration.poll()
        if self._scheduler.requests.draining and self._scheduler.empty:
            self._call(self._empty.set)
        if not turn.progressed:
            self._sleep()

    def _execute_commands(self) -> bool:
        """Execute the queued commands; return True if there were any."""
        executed = False
        while not self._commands.empty():
            self._commands.get()()
            executed = True
        return executed

    def _count(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            scheduler.running,
            scheduler.waiting,
            SchedulerTotals(**vars(scheduler.totals)),
            scheduler.uncomputed_tokens,
            scheduler.available_blocks,
            deferred=scheduler.deferred if self._engine.blocks.ready else scheduler.waiting,
        )

    def _observe(self, times: StepTimes, tokens: int, delivering: float) -> None:
        waited, self._waited = self._waited, 0.0
        publish = times.publish + delivering
        self._observer.on_step(StepStats(tokens, times.ran, times.plan, waited, times.forward, times.sample, publish))

    def _sleep(self) -> None:
        waits = self._manager.waiting or (self._manager.lost and not self._scheduler.empty)
        started, any_live = time.monotonic(), self._scheduler.running or self._scheduler.waiting
        try:
            command = self._commands.get(timeout=_POLL_SECONDS_WITHOUT_KVMANAGER if waits else None)
        except queue.Empty:
            return
        finally:
            self._waited += time.monotonic() - started if any_live else 0.0
        command()

    def _watch_manager(self) -> None:
        if self._manager.record(self._engine.blocks.ready, time.monotonic()):
            detail = f"the engine has been without its KV manager for more than {self._manager.timeout_seconds:g} s"
            self._scheduler.requests.fail_all(Failure.BLOCK_MANAGER, detail)

    def _stop(self, *, abandoned: bool) -> None:
        self._stopping, self._abandoned = True, abandoned or self._abandoned

    def _call(self, callback: Callable[[], None]) -> None:
        """Call on the event loop, unless that is closed."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("the event loop is closed")
