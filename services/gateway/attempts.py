"""A request's attempts at engines, one after the other where one cannot go on."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quire.v1 import engine_pb2
from services.gateway.fleet.dispatch import Dispatcher, Placement
from services.gateway.fleet.engine_events import Failover, FailoverReason, late
from services.gateway.fleet.engine_link import EngineLink
from services.gateway.fleet.lost_engines import LostEngines
from services.gateway.fleet.request_stream import Event
from services.gateway.prepared_request import PreparedRequest
from services.runtime.errors import RequestGivenUp, Unavailable

# An engine that refused may have room again, without saying so.
_LOOK_AGAIN_SECONDS = 0.2


@dataclass(frozen=True)
class FailoverLimits:
    """How often a request may go on at another engine, and how many seconds it waits for one."""

    times: int
    seconds: float


class RequestAttempts:
    """At most one engine has the request at a time. `clock` is in seconds."""

    def __init__(
        self, request: PreparedRequest, dispatcher: Dispatcher, limits: FailoverLimits, clock: Callable[[], float]
    ) -> None:
        self._request = request
        self._dispatcher = dispatcher
        self._limits = limits
        self._clock = clock
        self._placement: Placement | None = None
        self._lost = LostEngines()
        self._refused_by: set[EngineLink] = set()
        self._wait_until: float | None = None  # for an engine, since one was lost

    async def begin(self) -> None:
        """Give the request to an engine. Raises a ServiceError."""
        request = self._request
        self._take(await self._dispatcher.place(request.model, request.submission, request.span))

    async def next_events(self) -> list[Event]:
        """Wait for what the engine sends next. Raises EngineDisconnected, SlowClient, or DeadlineExceeded."""
        try:
            return await self._present().ticket.next_events(self._request.deadline.at)
        except TimeoutError as error:
            raise late(began=self._request.progress.started) from error

    def on_started(self, started: engine_pb2.RequestStarted) -> None:
        """The present engine has begun the request."""
        self._present().started(started.cached_tokens)
        self._lost.started(isolated=started.isolated)
        self._refused_by.clear()
        self._wait_until = None

    def on_tokens(self) -> None:
        """The present engine has generated a token."""
        self._lost.gained_token()

    def cancel(self, reason: engine_pb2.CancelReason.ValueType, sample: int | None = None) -> None:
        """End the request, or one sample of it, at the engine that has it, if any."""
        if self._placement is not None:
            self._placement.cancel(reason, sample)

    async def fail_over(self, failover: Failover, samples: Sequence[engine_pb2.SampleState]) -> None:
        """Give the request to another engine, with what was generated. Raises the failover's error if none is left."""
        left, reason = self._present(), failover.reason
        self.leave(None, reason.value)
        if reason is FailoverReason.LOST:
            self._count_lost(left.engine_id)
        self._lost.left()
        if reason in (FailoverReason.REFUSED, FailoverReason.NO_KV_MANAGER):
            self._refused_by.add(left.link)
        if reason is not FailoverReason.REFUSED:
            self._count_failover(left.engine_id, failover)
        self._take(await self._place_again(failover, samples))

    def leave(self, reason: engine_pb2.CancelReason.ValueType | None, fault: str = "") -> None:
        """Have nothing more to do with the engine that has it, if any. A reason ends the request there."""
        placement, self._placement = self._placement, None
        if placement is not None:
            placement.leave(reason, fault)

    def _take(self, placement: Placement) -> None:
        self._placement, progress = placement, self._request.progress
        progress.engine_id = placement.engine_id
        progress.attempts += 1

    def _present(self) -> Placement:
        assert self._placement is not None, "the request has begun"
        return self._placement

    def _count_lost(self, engine_id: str) -> None:
        try:
            self._lost.add(engine_id)
        except RequestGivenUp:
            request = self._request
            self._dispatcher.given_up(request.model.name, request.submission.request_id, self._lost.engine_ids)
            raise

    def _count_failover(self, engine_id: str, failover: Failover) -> None:
        request, most = self._request, self._limits.times
        if request.progress.failovers == most:
            message = f"{failover.error}; the request went on elsewhere {most} times already"
            raise Unavailable(message) if most else failover.error
        request.progress.failovers += 1
        waits = failover.reason is not FailoverReason.NO_KV_MANAGER
        self._wait_until = self._clock() + self._limits.seconds if waits else None
        request.span.add_event("failover", {"quire.engine": engine_id, "quire.reason": failover.reason.value})
        self._dispatcher.failed_over(request.model.name, request.submission.request_id, engine_id, failover.reason)

    async def _place_again(self, failover: Failover, samples: Sequence[engine_pb2.SampleState]) -> Placement:
        """Place the request at an engine that has not refused it; wait for one if the request was lost."""
        request = self._request
        while True:
            submission = request.resumption(samples, isolated=self._lost.isolated)
            try:
                return await self._dispatcher.place(request.model, submission, request.span, self._refused_by)
            except Unavailable as error:
                if self._wait_until is None:
                    raise failover.error from error
                if self._clock() >= self._wait_until:
                    waited = f"no other took the request in {self._limits.seconds:g} s"
                    raise Unavailable(f"{failover.error}; {waited}") from error
                await self._wait_for_engine(self._wait_until)
            self._refused_by.clear()

    async def _wait_for_engine(self, until: float) -> None:
        deadline = self._request.deadline.at
        pause = min(until, self._clock() + _LOOK_AGAIN_SECONDS)
        if deadline is not None and deadline <= pause:
            pause = deadline
        with suppress(TimeoutError):
            async with asyncio.timeout_at(pause):
                await self._dispatcher.wait_for_change()
        if deadline is not None and self._clock() >= deadline:
            raise late(began=self._request.progress.started)
