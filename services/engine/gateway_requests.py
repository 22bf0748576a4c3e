"""Requests of gateways on the engine's thread: their owners, and the outputs for each gateway."""

import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.constraint import Constraint
from engine.errors import RequestRefused, SubmissionFailed
from engine.schedule.outputs import Finished, Output, Tokens
from engine.schedule.scheduler import Scheduler
from engine.schedule.sequence_group import Group
from quire.v1 import engine_pb2
from services.engine.gateway_link import GatewayLink
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports
from services.wire.requests.output import (
    TokenWriter,
    add_output,
    failed_message,
    finished_message,
    merge,
    refused_message,
)
from services.wire.requests.request import request_of

# Time limit for sending one message to a gateway.
_MAX_SEND_SECONDS = 5.0

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class Arrival:
    """A submission, its arrival time by the engine's clock, its compiled constraint, and warnings for its client."""

    submission: engine_pb2.Submission
    at: float
    constraint: Constraint | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class EventLoopLink:
    """The engine's thread's link to the event loop: calls there, waits for it, and the clock of both, in seconds."""

    call: Callable[[Callable[[], None]], None]
    wait: Callable[[threading.Event, float], bool]
    clock: Callable[[], float]


@dataclass(frozen=True)
class _Owner:
    """Receiver of a request's outputs."""

    link: GatewayLink
    attempt: int
    submitted_at: float
    arrival_step: int
    warnings: tuple[str, ...]
    writers: dict[int, TokenWriter] = field(default_factory=dict)  # by sample

    def add_writer(self, request_id: str, sample: int) -> TokenWriter:
        writer = self.writers[sample] = TokenWriter(request_id, self.attempt, sample)
        return writer


class GatewayRequests:
    """Passes requests to the scheduler, and outputs to the links of gateways. Only the engine's thread calls it.

    An exception in the outputs of a request ends at most that request.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        eos_token_ids: frozenset[int],
        recorder: RequestsRecorder,
        reports: RequestReports,
        loop: EventLoopLink,
    ) -> None:
        """Start without requests. The links belong to `loop`."""
        self._scheduler = scheduler
        self._eos_token_ids = eos_token_ids
        self._recorder = recorder
        self._reports = reports
        self._loop = loop
        self._owners: dict[str, _Owner] = {}
        self._unwritten: dict[str, str] = {}  # requests whose outputs could not be written, with the reason
        self._to_send: dict[GatewayLink, engine_pb2.StepOutput] = {}
        self._parts: defaultdict[GatewayLink, list[bytes]] = defaultdict(list)  # tokens after those of `_to_send`

    def submit(self, link: GatewayLink, arrival: Arrival) -> None:
        """Queue a request; a refusal becomes an output."""
        submission, at = arrival.submission, arrival.at
        # Before a request with the same id begins: its predecessor's outputs belong to the predecessor's owner.
        self._write_all(self._scheduler.take_outputs())
        try:
            self._scheduler.requests.submit(request_of(submission, self._eos_token_ids, at, arrival.constraint))
        except RequestRefused as refused:
            self._refuse(link, arrival, refused)
        except Exception as fault:
            log.exception("request %s could not be read", submission.request_id)
            self._refuse(link, arrival, SubmissionFailed(f"the engine could not read the request: {fault!r}"))
        else:
            steps = self._scheduler.totals.steps
            self._owners[submission.request_id] = _Owner(link, submission.attempt, at, steps, arrival.warnings)
            self._report(partial(self._reports.on_queued, submission, at))

    def cancel(self, link: GatewayLink, cancel: engine_pb2.Cancel) -> None:
        """Cancel a request of this link, or one of its samples."""
        owner = self._owners.get(cancel.request_id)
        if owner and owner.link is link and owner.attempt == cancel.attempt:
            if cancel.HasField("sample"):
                self._scheduler.requests.end_sample(cancel.request_id, cancel.sample)
            else:
                self._scheduler.requests.cancel(cancel.request_id)

    def drop(self, link: GatewayLink) -> None:
        """Cancel all requests of a disconnected link."""
        for request_id in [request_id for request_id, owner in self._owners.items() if owner.link is link]:
            self._scheduler.requests.cancel(request_id)

    def deliver(self, outputs: list[Output]) -> None:
        """Queue one message on each link that has outputs."""
        self._write_all(outputs)
        for link in list(self._parts):
            self._message_to(link)
        to_send, self._to_send = self._to_send, {}
        for link, message in to_send.items():
            message.step = self._scheduler.totals.steps
            self._loop.call(partial(link.put, message))
            if message.started and any(started.isolated for started in message.started):
                self._wait_until_sent(link)

    def _wait_until_sent(self, link: GatewayLink) -> None:
        """Wait until the gateway has its message, so that it can blame the request if the next turn ends the process.

        If the stream is blocked, the request is computed anyway after a time limit.
        """
        sent = threading.Event()
        self._loop.call(partial(link.on_sent, sent.set))
        if not self._loop.wait(sent, _MAX_SEND_SECONDS):
            log.warning("a gateway did not receive in time that a request runs isolated")

    def _refuse(self, link: GatewayLink, arrival: Arrival, refused: RequestRefused) -> None:
        self._message_to(link).refused.append(refused_message(arrival.submission, refused))
        self._report(partial(self._reports.on_refused, arrival.submission, refused, arrival.at))

    def _report(self, report: Callable[[], None]) -> None:
        """Call an observer; its exceptions do not end anything."""
        try:
            report()
        except Exception:
            log.exception("a request could not be reported")

    def _message_to(self, link: GatewayLink) -> engine_pb2.StepOutput:
        """Return the message for a link, with all that was written so far."""
        if (message := self._to_send.get(link)) is None:
            message = self._to_send[link] = engine_pb2.StepOutput()
        if parts := self._parts.pop(link, None):
            merge(message, parts)
        return message

    def _write_all(self, outputs: list[Output]) -> None:
        for output in outputs:
            try:
                self._write(output)
            except Exception as fault:
                log.exception("the outputs of request %s could not be written", output.request_id)
                self._unwritten[output.request_id] = f"the engine could not write the outputs: {fault!r}"
                self._end_unwritten(output, fault)
                self._write_all(self._scheduler.take_outputs())

    def _end_unwritten(self, output: Output, fault: Exception) -> None:
        """Fail a request whose outputs cannot be written. If it has ended already, write only its end."""
        if isinstance(output, Finished):
            self._write(output)
        else:
            self._scheduler.requests.fail(output.request_id, fault)

    def _write(self, output: Output) -> None:
        owner = self._owners[output.request_id]
        if self._unwritten and output.request_id in self._unwritten and not isinstance(output, Finished):
            return
        if isinstance(output, Tokens) and output.end is None and len(output.tokens) == 1:
            token = output.tokens[0]
            if token.logprob is None:  # nearly all outputs
                writer = owner.writers.get(output.sample) or owner.add_writer(output.request_id, output.sample)
                writer.write(self._parts[owner.link], token.token_id)
                return
        message = self._message_to(owner.link)
        if not isinstance(output, Finished):
            add_output(message, output, owner.attempt, owner.warnings)
            return
        group, finished = output.group, self._finished_message(output.group, owner)
        del self._owners[output.request_id]
        message.finished.append(finished)
        if group.fault is not None:
            log.error("request %s failed", output.request_id, exc_info=group.fault)
        self._report(partial(self._reports.on_ended, group, finished, owner.submitted_at))
        self._report(partial(self._recorder.ended, group, owner.arrival_step, self._scheduler.totals.steps))

    def _finished_message(self, group: Group, owner: _Owner) -> engine_pb2.RequestFinished:
        if (detail := self._unwritten.pop(group.request.request_id, None)) is not None:
            return failed_message(group, owner.attempt, detail)
        return finished_message(group, owner.attempt, owner.submitted_at, self._loop.clock())
