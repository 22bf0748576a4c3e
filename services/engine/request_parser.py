"""The submissions of one gateway on their way to the engine: those with a constraint wait until it is compiled."""

import asyncio
import logging
import time

from engine.errors import RequestExists, RequestRefused, SubmissionFailed
from engine.schedule.request import FinishReason
from quire.v1 import engine_pb2
from services.engine.driver import EngineDriver
from services.engine.gateway_link import GatewayLink
from services.engine.gateway_requests import Arrival
from services.engine.guided.constraints import Constraints
from services.wire.duration import seconds_of
from services.wire.output import refused_message, unbegun_message
from services.wire.request import check

log = logging.getLogger("quire.engine")


class RequestParser:
    """Hands submissions and cancels to the engine. Lives on the event loop; no call of it waits."""

    def __init__(self, driver: EngineDriver, link: GatewayLink, constraints: Constraints) -> None:
        self._driver = driver
        self._link = link
        self._constraints = constraints
        self._compiling: dict[str, tuple[Arrival, asyncio.Task[None]]] = {}

    def submit(self, submission: engine_pb2.Submission) -> None:
        """Queue a request, or refuse it on the link."""
        arrival = Arrival(submission, time.monotonic())
        try:
            check(submission)
        except RequestRefused as refused:
            self._refuse(arrival, refused)
            return
        if submission.request_id in self._compiling:
            self._refuse(arrival, RequestExists(f"request_id {submission.request_id!r} is live", "request_id"))
        elif submission.HasField("constraint"):
            self._compiling[submission.request_id] = arrival, asyncio.create_task(self._compile(arrival))
        else:
            self._driver.submit(self._link, arrival)

    def cancel(self, cancel: engine_pb2.Cancel) -> None:
        """End a request of this link, or a sample of it."""
        arrival, task = self._compiling.get(cancel.request_id, (None, None))
        if arrival is None or task is None:
            self._driver.cancel(self._link, cancel)
        elif arrival.submission.attempt == cancel.attempt:
            del self._compiling[cancel.request_id]
            task.cancel()
            self._end(arrival, FinishReason.CANCELLED)

    def close(self) -> None:
        """End all requests of this link: it is gone."""
        for _, task in self._compiling.values():
            task.cancel()
        self._driver.drop(self._link)

    async def _compile(self, arrival: Arrival) -> None:
        """Queue a request with its constraint, if it is compiled before the request is cancelled or late."""
        submission = arrival.submission
        limit = seconds_of(submission.timeout) if submission.HasField("timeout") else None
        try:
            async with asyncio.timeout(limit):
                constraint = await self._constraints.compiled(submission.constraint)
        except TimeoutError:
            del self._compiling[submission.request_id]
            self._end(arrival, FinishReason.FAILED)
        except RequestRefused as refused:
            del self._compiling[submission.request_id]
            self._refuse(arrival, refused)
        except Exception as error:  # else the client would wait for ever
            log.exception("the constraint of request %s could not be compiled", submission.request_id)
            del self._compiling[submission.request_id]
            self._refuse(arrival, SubmissionFailed(f"its constraint could not be compiled: {error!r}"))
        else:
            del self._compiling[submission.request_id]
            self._driver.submit(self._link, Arrival(submission, arrival.at, constraint))

    def _refuse(self, arrival: Arrival, refused: RequestRefused) -> None:
        message = refused_message(arrival.submission, refused)
        self._link.push(engine_pb2.StepOutput(step=self._driver.steps, refused=[message]))
        self._driver.reports.refused(arrival.submission, refused, arrival.at)

    def _end(self, arrival: Arrival, reason: FinishReason) -> None:
        """Say that a request ended while its constraint was compiled: cancelled, or late."""
        message = unbegun_message(arrival.submission, reason, time.monotonic() - arrival.at)
        if reason is FinishReason.FAILED:
            message.failure = engine_pb2.FAILURE_REASON_DEADLINE_QUEUED
            message.detail = "its time was over while its constraint was compiled"
        self._link.push(engine_pb2.StepOutput(step=self._driver.steps, finished=[message]))
        self._driver.reports.unbegun(arrival.submission, message, arrival.at)
