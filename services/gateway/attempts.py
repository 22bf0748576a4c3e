"""One request's attempts at engines, with failover."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from quire.v1 import engine_pb2
from services.gateway.fleet.dispatch import Dispatcher, Placement
from services.gateway.fleet.engine_events import Failover, FailoverReason, deadline_error
from services.gateway.fleet.engine_link import EngineLink
from services.gateway.fleet.lost_engines import LostEngines
from services.gateway.fleet.request_stream import Event, TokenReceiver
from services.gateway.prepared_request import PreparedRequest
from services.runtime.errors import InvalidField, RepeatedEngineLoss, ServiceError, Unavailable

# An engine that refused the request does not report when it has room again.
_RETRY_SECONDS = 0.2


@dataclass(frozen=True)
class FailoverLimits:
    """Maximum failovers of a request, and the seconds that each may wait for an engine."""

    failovers: int
    wait_seconds: float


class RequestAttempts:
    """Submits a request to one engine at a time. `clock` is in seconds."""

    def __init__(
        self, request: PreparedRequest, dispatcher: Dispatcher, limits: FailoverLimits, clock: Callable[[], float]
    ) -> None:
        self._request = request
        self._dispatcher = dispatcher
        self._limits = limits
        self._clock = clock
        self._placement: Placement | None = None
        self._receiver: TokenReceiver | None = None
        self.gained = False  # a token from the current engine
        self._lost = LostEngines()
        self._refused_by: set[EngineLink] = set()
        self._retry_until: float | None = None  # set by a failover until the request starts
        self._cause: ServiceError | None = None  # of the latest failover; refusals do not replace it
        self._fingerprint = ""  # of the engine that generated the first token

    def receive_tokens(self, receiver: TokenReceiver) -> None:
        """Give tokens to `receiver`, from the current engine and those that follow; see RequestStream."""
        self._receiver = receiver

    async def submit(self) -> None:
        """Submit the request to an engine. Raises a ServiceError."""
        request = self._request
        self._set(await self._dispatcher.place(request.model, request.submission, request.span))

    def next_events(self) -> Coroutine[Any, Any, list[Event]]:
        """Wait for the next events. Raises EngineDisconnected, SlowClient, or TimeoutError at the deadline."""
        return self._current().stream.next_events(self._request.deadline.at)

    def on_started(self, started: engine_pb2.RequestStarted) -> None:
        """Record that the current engine has started the request."""
        self._current().on_started(started.cached_tokens)
        self._lost.on_started(isolated=started.isolated)
        self._refused_by.clear()
        self._retry_until = None

    def on_tokens(self) -> None:
        """Record that the current engine has generated a token: engines of other fingerprints cannot continue it."""
        self.gained = True
        self._fingerprint = self._fingerprint or self._current().fingerprint
        self._lost.on_token()

    def cancel(self, reason: engine_pb2.CancelReason.ValueType, sample: int | None = None) -> None:
        """Cancel the request or one of its samples at the current engine, if any."""
        if self._placement is not None:
            self._placement.cancel(reason, sample)

    async def fail_over(self, failover: Failover, samples: Sequence[engine_pb2.SampleState]) -> None:
        """Resume the request from `samples` at another engine. Raises the failover's error if there is none."""
        previous, reason = self._current(), failover.reason
        self.release(None, reason.value)
        if reason is FailoverReason.LOST:
            self._count_lost(previous.engine_id)
        self._lost.on_released()
        if reason in (FailoverReason.REFUSED, FailoverReason.NO_KV_MANAGER):
            self._refused_by.add(previous.link)
        if reason is not FailoverReason.REFUSED:
            self._cause = failover.error
            self._count_failover(previous.engine_id, failover)
        self._set(await self._place_again(failover, samples))

    def release(self, reason: engine_pb2.CancelReason.ValueType | None, error: str = "") -> None:
        """Release the current engine, if any, cancelling the request there if a reason is given."""
        placement, self._placement = self._placement, None
        if placement is not None:
            placement.release(reason, error)

    def _set(self, placement: Placement) -> None:
        self._placement, progress = placement, self._request.progress
        placement.stream.receiver, self.gained = self._receiver, False
        progress.engine_id = placement.engine_id
        progress.attempts += 1

    def _current(self) -> Placement:
        assert self._placement is not None, "the request was submitted"
        return self._placement

    def _count_lost(self, engine_id: str) -> None:
        try:
            self._lost.add(engine_id)
        except RepeatedEngineLoss:
            request = self._request
            self._dispatcher.on_given_up(request.model.name, request.submission.request_id, self._lost.engine_ids)
            raise

    def _count_failover(self, engine_id: str, failover: Failover) -> None:
        request, limit = self._request, self._limits.failovers
        if request.progress.failovers == limit:
            message = f"{failover.error}; the request has used its {limit} failovers"
            raise Unavailable(message) if limit else failover.error
        request.progress.failovers += 1
        may_wait = failover.reason is not FailoverReason.NO_KV_MANAGER
        self._retry_until = self._clock() + self._limits.wait_seconds if may_wait else None
        request.span.add_event("failover", {"quire.engine": engine_id, "quire.reason": failover.reason.value})
        self._dispatcher.on_failover(request.model.name, request.submission.request_id, engine_id, failover.reason)

    async def _place_again(self, failover: Failover, samples: Sequence[engine_pb2.SampleState]) -> Placement:
        """Place the request at an engine that has not refused it. After a failover, wait for one."""
        request = self._request
        while True:
            submission = request.resumption(samples, isolated=self._lost.isolated)
            try:
                return await self._dispatcher.place(
                    request.model, submission, request.span, self._refused_by, self._fingerprint
                )
            except Unavailable as error:
                if self._retry_until is None:
                    raise (self._cause or failover.error) from error
                if self._clock() >= self._retry_until:
                    raise self._timeout(failover) from error
                await self._wait_for_engine(self._retry_until)
            self._refused_by.clear()

    def _timeout(self, failover: Failover) -> ServiceError:
        """Return the error of a request for which no other engine was found in time."""
        if isinstance(failover.error, InvalidField) and not self._fingerprint:
            return failover.error  # all engines that are left have refused it; the lost one may have had room for it
        within = f"no other engine accepted the request within {self._limits.wait_seconds:g} s"
        return Unavailable(f"{failover.error}; {within}")

    async def _wait_for_engine(self, until: float) -> None:
        deadline = self._request.deadline.at
        pause = min(until, self._clock() + _RETRY_SECONDS)
        if deadline is not None and deadline <= pause:
            pause = deadline
        with suppress(TimeoutError):
            async with asyncio.timeout_at(pause):
                await self._dispatcher.wait_for_change()
        if deadline is not None and self._clock() >= deadline:
            raise deadline_error(started=self._request.progress.started)
