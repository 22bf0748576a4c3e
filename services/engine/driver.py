"""Runs the engine's loop on its own thread, and carries requests in and outputs out.

Only this thread touches the engine. Other threads queue commands for it; it posts outputs to the event loop.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from engine.run.loop import Engine, StepTimes, Turn
from engine.schedule.request import Failure
from engine.schedule.scheduler import IdleReason
from quire.v1 import engine_pb2
from services.engine.administration import Administration
from services.engine.gateway_link import GatewayLink
from services.engine.gateway_requests import Arrival, EventLoopLink, GatewayRequests
from services.engine.manager_monitor import ManagerMonitor
from services.engine.observer import EngineLoad, EngineObserver, EngineStats, StepStats
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports

_POLL_SECONDS_WITHOUT_KVMANAGER = 0.2
# While requests are live the loop never sleeps longer: deadlines pass, and no wake-up may be lost for good.
_MOST_IDLE_SECONDS = 1.0
# After this time without a step, while requests are live, the log says so.
_STALLED_SECONDS = 30.0
_REPEATED = 2

log = logging.getLogger("quire.engine")


class Pause(NamedTuple):
    """How long the engine's thread may sleep, in seconds; None: until a command arrives."""

    seconds: float | None


class StepMonitor:
    """Watches that an engine with requests makes steps, and decides when its loop may sleep.

    The engine's thread calls it, except for `seconds_without_step`.
    """

    def __init__(self) -> None:
        self._since: float | None = None  # the last step, or the arrival of requests; None without requests
        self._logged = False
        self._unexplained = 0  # consecutive turns without progress and without a reason

    def seconds_without_step(self, now: float) -> float:
        """Return the time since the last step while requests are live; 0 without requests."""
        since = self._since
        return 0.0 if since is None else max(0.0, now - since)

    def record(self, turn: Turn, now: float, *, live: bool) -> bool:
        """Record a turn, after which requests are live or not. Return whether the next turn can do nothing.

        A turn that does nothing without a reason is repeated once.
        """
        if not live:
            self._since, self._logged = None, False
        elif turn.step is not None or self._since is None:
            self._since, self._logged = now, False
        elif now - self._since > _STALLED_SECONDS and not self._logged:
            self._logged = True
            why = turn.idle.value if turn.idle else "the scheduler gives no reason"
            log.warning("requests are live, but there was no step for %.0f s: %s", now - self._since, why)
        self._unexplained = 0 if turn.progressed or turn.idle else self._unexplained + 1
        if self._unexplained == _REPEATED:
            log.error("requests are live, but the scheduler finds nothing to do; please report this as a bug")
        return turn.idle is not None or self._unexplained >= _REPEATED


class EngineDriver:
    """Owns an engine. `run` is the thread's body, and calls `turn`; other public methods are for the event loop.

    `load` is the part of `stats` that messages to gateways have.
    """

    def __init__(
        self,
        engine: Engine,
        eos_token_ids: frozenset[int],
        seconds_without_kvmanager: float,
        observer: EngineObserver,
        recorder: RequestsRecorder,
        reports: RequestReports,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        """`clock` returns seconds. `wait` blocks the engine's thread until an event, for at most some seconds."""
        self.reports = reports
        self.clock = clock
        self._engine = engine
        self._scheduler = engine.scheduler
        self._administration = Administration(engine.scheduler)
        self._requests = GatewayRequests(
            engine.scheduler, eos_token_ids, recorder, reports, EventLoopLink(self._call, wait, clock)
        )
        self._manager = ManagerMonitor(seconds_without_kvmanager, clock())
        self._observer = observer
        self._totals, self.load = engine.scheduler.totals.snapshot(), _load_of(engine)
        engine.on_launch(self._count_requests)
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.stopping = self._abandoned = False
        self._waited = 0.0  # seconds spent waiting for the KV manager since the last step
        self._steps = StepMonitor()
        self._empty = asyncio.Event()
        self._ended = asyncio.Event()

    def on_manager_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the event loop whenever `without_kvmanager` has changed."""
        self._manager.on_change(lambda: self._call(changed))

    @property
    def has_commands(self) -> bool:
        """Whether a command waits for the next turn."""
        return not self._commands.empty()

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
        """Requests as of the launch or the end of a step, the rest as of its end, and the time since the last step."""
        load = self.load
        return EngineStats(
            load.running,
            load.waiting,
            self._totals,
            load.uncomputed_tokens,
            load.available_blocks,
            deferred=load.deferred,
            seconds_without_step=self._steps.seconds_without_step(self.clock()) if load.running or load.waiting else 0,
        )

    @property
    def request_blocks(self) -> int:
        """Maximum number of blocks that one request can have."""
        return self._scheduler.capacity.unpinned_blocks

    async def administer(self, request: engine_pb2.EngineAdminRequest) -> engine_pb2.EngineAdminResponse:
        """Execute an admin request, and return the pins after it. Raises ServiceError."""
        answer: asyncio.Future[engine_pb2.EngineAdminResponse] = self._loop.create_future()
        self._commands.put(lambda: self._administration.submit(request, answer, self.clock()))
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

    # On the engine's thread.

    def run(self) -> None:
        """Run the engine's turns until stopped; sleep after a turn that gives a reason."""
        try:
            while not self.stopping:
                if (pause := self.turn()) is not None:
                    self._sleep(pause)
        finally:
            self.end()

    def end(self) -> None:
        """End the live requests of an engine that was stopped, and let `stop` and `abandon` return."""
        try:
            if self.stopping and not self._abandoned:
                self._scheduler.requests.cancel_all()
                self._requests.deliver(self._scheduler.take_outputs())
        finally:
            self._call(self._ended.set)

    def turn(self) -> Pause | None:
        """Execute the queued commands and one turn of the engine. Return how long nothing can be done, if so."""
        self._execute_commands()
        turn = self._engine.turn()
        turned, computed = self.clock(), self._totals.computed_tokens
        self._watch_manager()  # after the turn, which has received the manager's last answers
        if (failure := self._engine.take_failure()) is not None:
            log.error("a step failed", exc_info=failure)
        self._totals, self.load = self._scheduler.totals.snapshot(), _load_of(self._engine)  # before the outputs
        self._requests.deliver([*turn.outputs, *self._scheduler.take_outputs()])
        if turn.step is not None:
            self._observe(turn.step, self._totals.computed_tokens - computed, self.clock() - turned)
        self._administration.poll()
        if self._scheduler.requests.draining and self._scheduler.empty:
            self._call(self._empty.set)
        live = self._scheduler.running + self._scheduler.waiting > 0
        if self._steps.record(turn, self.clock(), live=live):
            without_manager = self._manager.waiting or (self._manager.lost and not self._scheduler.empty)
            return _pause_after(turn.idle, without_manager=without_manager)
        return None

    def _execute_commands(self) -> None:
        while not self._commands.empty():
            self._commands.get()()

    def _count_requests(self) -> None:
        """Count the requests before a step, because the end of the turn before it has older counts."""
        self.load = EngineLoad(*_requests_of(self._engine), *self.load[3:])

    def _observe(self, times: StepTimes, tokens: int, delivering: float) -> None:
        waited, self._waited = self._waited, 0.0
        publish = times.publish + delivering
        self._observer.on_step(StepStats(tokens, times.ran, times.plan, waited, times.forward, times.sample, publish))

    def _sleep(self, pause: Pause) -> None:
        started, any_live = self.clock(), self._scheduler.running or self._scheduler.waiting
        try:
            command = self._commands.get(timeout=pause.seconds)
        except queue.Empty:
            return
        finally:
            self._waited += self.clock() - started if any_live else 0.0
        command()

    def _watch_manager(self) -> None:
        if self._manager.record(self._engine.blocks.ready, self.clock()):
            detail = f"the engine has been without its KV manager for more than {self._manager.timeout_seconds:g} s"
            self._scheduler.requests.fail_all(Failure.BLOCK_MANAGER, detail)

    def _stop(self, *, abandoned: bool) -> None:
        self.stopping, self._abandoned = True, abandoned or self._abandoned

    def _call(self, callback: Callable[[], None]) -> None:
        """Call on the event loop, unless that is closed."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            log.debug("the event loop is closed")


def _load_of(engine: Engine) -> EngineLoad:
    scheduler = engine.scheduler
    return EngineLoad(*_requests_of(engine), scheduler.uncomputed_tokens, scheduler.available_blocks)


def _requests_of(engine: Engine) -> tuple[int, int, int]:
    """Return how many requests run, wait, and wait for something other than blocks."""
    scheduler = engine.scheduler
    return scheduler.running, scheduler.waiting, scheduler.deferred if engine.blocks.ready else scheduler.waiting


def _pause_after(reason: IdleReason | None, *, without_manager: bool) -> Pause:
    if without_manager:
        return Pause(_POLL_SECONDS_WITHOUT_KVMANAGER)
    return Pause(None if reason is IdleReason.EMPTY else _MOST_IDLE_SECONDS)
