"""The requests of gateways on the engine's thread: whose they are, and what each gateway is sent of them."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from engine.constraint import Constraint
from engine.errors import RequestRefused, SubmissionFailed
from engine.schedule.outputs import Finished, Output
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence_group import Group
from quire.v1 import engine_pb2
from services.engine.gateway_link import GatewayLink
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports
from services.wire.output import add_output, failed_message, finished_message, refused_message
from services.wire.request import request_of

# For a gateway to be sent one message.
_LONGEST_ANNOUNCEMENT_SECONDS = 5.0

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class Arrival:
    """A submission, when it came on the clock of `time.monotonic`, and its constraint, compiled."""

    submission: engine_pb2.Submission
    at: float
    constraint: Constraint | None = None


@dataclass(frozen=True)
class _Owner:
    """Who gets a request's outputs."""

    link: GatewayLink
    attempt: int
    submitted_at: float
    arrival_step: int


class GatewayRequests:
    """Hands requests to the scheduler, and outputs to the links of their gateways. Only the engine's thread calls it.

    What fails at one request's outputs ends that request at most.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        recorder: RequestsRecorder,
        reports: RequestReports,
        on_event_loop: Callable[[Callable[[], None]], None],
    ) -> None:
        """Begin without requests. `on_event_loop` calls back where the links live."""
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._recorder = recorder
        self._reports = reports
        self._on_event_loop = on_event_loop
        self._owners: dict[str, _Owner] = {}
        self._unwritten: dict[str, str] = {}  # requests whose outputs could not be written, and why
        self._to_send: dict[GatewayLink, engine_pb2.StepOutput] = {}

    def submit(self, link: GatewayLink, arrival: Arrival) -> None:
        """Queue a request; a refusal becomes an output."""
        submission, at = arrival.submission, arrival.at
        # What is still to be sent of an ended request belongs to its owner, not to a new one of the same id.
        self._write_all(self._scheduler.take_outputs())
        try:
            self._scheduler.requests.submit(request_of(submission, self._eos_token_ids, at, arrival.constraint))
        except RequestRefused as refused:
            self._refuse(link, arrival, refused)
        except Exception as fault:
            log.exception("request %s could not be read", submission.request_id)
            self._refuse(link, arrival, SubmissionFailed(f"the engine failed at reading it: {fault!r}"))
        else:
            self._owners[submission.request_id] = _Owner(link, submission.attempt, at, self._scheduler.totals.steps)
            self._report(partial(self._reports.began, submission, at))

    def cancel(self, link: GatewayLink, cancel: engine_pb2.Cancel) -> None:
        """End a request of this link, or a sample of it."""
        owner = self._owners.get(cancel.request_id)
        if owner and owner.link is link and owner.attempt == cancel.attempt:
            if cancel.HasField("sample"):
                self._scheduler.requests.end_sample(cancel.request_id, cancel.sample)
            else:
                self._scheduler.requests.cancel(cancel.request_id)

    def drop(self, link: GatewayLink) -> None:
        """End all requests of a link that is gone."""
        for request_id in [request_id for request_id, owner in self._owners.items() if owner.link is link]:
            self._scheduler.requests.cancel(request_id)

    def deliver(self, outputs: list[Output]) -> None:
        """Push one message to each link that has outputs."""
        self._write_all(outputs)
        to_send, self._to_send = self._to_send, {}
        for link, message in to_send.items():
            message.step = self._scheduler.totals.steps
            self._on_event_loop(partial(link.push, message))
            if any(started.isolated for started in message.started):
                self._wait_until_sent(link)

    def _wait_until_sent(self, link: GatewayLink) -> None:
        """Give the gateway its message before the next turn: should that end the process, it names the request.

        Where the stream is held up, the request is computed all the same, a moment later.
        """
        sent = threading.Event()
        self._on_event_loop(partial(link.when_sent, sent.set))
        if not sent.wait(_LONGEST_ANNOUNCEMENT_SECONDS):
            log.warning("a gateway was not told in time which request runs isolated")

    def _refuse(self, link: GatewayLink, arrival: Arrival, refused: RequestRefused) -> None:
        self._message_to(link).refused.append(refused_message(arrival.submission, refused))
        self._report(partial(self._reports.refused, arrival.submission, refused, arrival.at))

    def _report(self, report: Callable[[], None]) -> None:
        """Report to an observer: that it fails is no reason to end anything."""
        try:
            report()
        except Exception:
            log.exception("a request could not be reported")

    def _message_to(self, link: GatewayLink) -> engine_pb2.StepOutput:
        return self._to_send.setdefault(link, engine_pb2.StepOutput())

    def _write_all(self, outputs: list[Output]) -> None:
        for output in outputs:
            try:
                self._write(output)
            except Exception as fault:
                log.exception("what request %s brought could not be written", output.request_id)
                self._unwritten[output.request_id] = f"the engine failed at writing what it brought: {fault!r}"
                self._end_unwritten(output, fault)
                self._write_all(self._scheduler.take_outputs())

    def _end_unwritten(self, output: Output, fault: Exception) -> None:
        """End a request whose outputs cannot be written, unless it has ended: then its end says so when it comes."""
        if isinstance(output, Finished):
            self._write(output)
        else:
            self._scheduler.requests.fail(output.request_id, fault)

    def _write(self, output: Output) -> None:
        owner = self._owners[output.request_id]
        if output.request_id in self._unwritten and not isinstance(output, Finished):
            return
        message = self._message_to(owner.link)
        if not isinstance(output, Finished):
            add_output(message, output, owner.attempt)
            return
        group, finished = output.group, self._finished_message(output.group, owner)
        del self._owners[output.request_id]
        message.finished.append(finished)
        if group.fault is not None:
            log.error("request %s failed", output.request_id, exc_info=group.fault)
        self._report(partial(self._reports.ended, group, finished, owner.submitted_at))
        self._report(partial(self._recorder.ended, group, owner.arrival_step, self._scheduler.totals.steps))

    def _finished_message(self, group: Group, owner: _Owner) -> engine_pb2.RequestFinished:
        if (detail := self._unwritten.pop(group.request.request_id, None)) is not None:
            return failed_message(group, owner.attempt, detail)
        return finished_message(group, owner.attempt, owner.submitted_at, time.monotonic())
