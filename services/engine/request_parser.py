"""Reads the submissions of one gateway; those with a constraint wait until it is compiled."""

import asyncio
import logging

from engine.errors import RequestExists, RequestRefused, SubmissionFailed
from engine.schedule.request import FinishReason
from quire.v1 import engine_pb2
from services.engine.driver import EngineDriver
from services.engine.gateway_link import GatewayLink
from services.engine.gateway_requests import Arrival
from services.engine.guided.constraints import Constraints
from services.wire.duration import seconds_of
from services.wire.requests.output import early_end_message, refused_message
from services.wire.requests.request import check

log = logging.getLogger("quire.engine")


class RequestParser:
    """Passes submissions and cancels to the engine. Belongs to the event loop; no call blocks."""

    def __init__(self, driver: EngineDriver, link: GatewayLink, constraints: Constraints) -> None:
        self._driver = driver
        self._link = link
        self._constraints = constraints
        self._compiling: dict[str, tuple[Arrival, asyncio.Task[None]]] = {}

    def submit(self, submission: engine_pb2.Submission) -> None:
        """Queue a request, or refuse it on the link."""
        arrival = Arrival(submission, self._driver.clock())
        try:
            check(submission)
        except RequestRefused as refused:
            self._refuse(arrival, refused)
            return
        if submission.request_id in self._compiling:
            self._refuse(arrival, RequestExists(f"request_id {submission.request_id!r} is live", "request_id"))
        elif submission.HasField("constraint") or submission.HasField("thought"):
            self._compiling[submission.request_id] = arrival, asyncio.create_task(self._compile(arrival))
        else:
            self._driver.submit(self._link, arrival)

    def cancel(self, cancel: engine_pb2.Cancel) -> None:
        """Cancel a request of this link, or one of its samples."""
        arrival, task = self._compiling.get(cancel.request_id, (None, None))
        if arrival is None or task is None:
            self._driver.cancel(self._link, cancel)
        elif arrival.submission.attempt == cancel.attempt:
            del self._compiling[cancel.request_id]
            task.cancel()
            self._end_early(arrival, FinishReason.CANCELLED)

    def close(self) -> None:
        """Cancel all requests of this link, which is disconnected."""
        for _, task in self._compiling.values():
            task.cancel()
        self._driver.drop(self._link)

    async def _compile(self, arrival: Arrival) -> None:
        """Queue a request after its constraint is compiled, unless it was cancelled or is late by then."""
        submission = arrival.submission
        limit = seconds_of(submission.timeout) if submission.HasField("timeout") else None
        try:
            async with asyncio.timeout(limit):
                constraint = await self._constraints.of_request(submission)
        except TimeoutError:
            del self._compiling[submission.request_id]
            self._end_early(arrival, FinishReason.FAILED)
        except RequestRefused as refused:
            del self._compiling[submission.request_id]
            self._refuse(arrival, refused)
        except Exception as error:  # otherwise the client would wait forever
            log.exception("the constraint of request %s could not be compiled", submission.request_id)
            del self._compiling[submission.request_id]
            self._refuse(arrival, SubmissionFailed(f"its constraint could not be compiled: {error!r}"))
        else:
            del self._compiling[submission.request_id]
            self._driver.submit(self._link, Arrival(submission, arrival.at, constraint, constraint.omitted))

    def _refuse(self, arrival: Arrival, refused: RequestRefused) -> None:
        message = refused_message(arrival.submission, refused)
        self._link.put(engine_pb2.StepOutput(step=self._driver.steps, refused=[message]))
        self._driver.reports.on_refused(arrival.submission, refused, arrival.at)

    def _end_early(self, arrival: Arrival, reason: FinishReason) -> None:
        """Send the end of a request that was cancelled or late while its constraint was compiled."""
        message = early_end_message(arrival.submission, reason, self._driver.clock() - arrival.at)
        if reason is FinishReason.FAILED:
            message.failure = engine_pb2.FAILURE_REASON_DEADLINE_QUEUED
            message.detail = "the deadline passed while the constraint was compiled"
        self._link.put(engine_pb2.StepOutput(step=self._driver.steps, finished=[message]))
        self._driver.reports.on_ended_before_queue(arrival.submission, message, arrival.at)
