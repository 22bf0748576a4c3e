"""Runs the engine's loop on a thread of its own, and carries requests in and outputs out.

The thread is the only one that touches the engine. Others post commands to it; it hands outputs to the event loop.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from engine.constraint import Constraint
from engine.errors import RequestRefused, SubmissionFailed
from engine.run.loop import Engine, StepTimes
from engine.schedule.request import Failure
from engine.schedule.scheduler import Finished, Output, Scored, Started, Tokens
from engine.schedule.sequence_group import Group
from quire.v1 import engine_pb2
from services.engine.administration import Administration
from services.engine.gateway_link import GatewayLink
from services.engine.observer import EngineFigures, EngineObserver, StepFigures
from services.engine.recording import RequestsRecorder
from services.engine.request_reports import RequestReports
from services.wire.output_codec import (
    failed_message,
    finished_message,
    refused_message,
    request_of,
    sample_end,
    token_logprobs,
)

_POLL_SECONDS_WITHOUT_KVMANAGER = 0.2
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
        self._engine = engine
        self._administration = Administration(engine.scheduler)
        self._recorder = recorder
        self.reports = reports
        self._eos_token_ids = eos_token_ids
        self._patience = seconds_without_kvmanager
        self._observer = observer
        self._figures = self._count()
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._owners: dict[str, _Owner] = {}
        self._unwritten: dict[str, str] = {}  # requests whose outputs could not be written, and why
        self._news: dict[GatewayLink, engine_pb2.StepOutput] = {}
        self._stopping = self._abandoned = False
        self._without_kvmanager_since: float | None = time.monotonic()
        self._waited = 0.0  # seconds for the KV manager since the last step
        self._empty = asyncio.Event()
        self._ended = asyncio.Event()
        self._draining = False
        self.without_kvmanager = False  # for longer than requests wait: each fails
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Have this called on the event loop whenever `without_kvmanager` has changed."""
        self._watchers.append(changed)

    @property
    def steps(self) -> int:
        """Steps executed so far."""
        return self._engine.scheduler.totals.steps

    @property
    def figures(self) -> EngineFigures:
        """Requests and totals as of the last turn."""
        return self._figures

    @property
    def request_blocks(self) -> int:
        """Blocks that one request can have at most."""
        return self._engine.scheduler.capacity.unpinned_blocks

    async def administer(self, request: engine_pb2.EngineAdminRequest) -> engine_pb2.EngineAdminResponse:
        """Change what is pinned; return when it is done, and what is pinned then. Raises a ServiceError."""
        answer: asyncio.Future[engine_pb2.EngineAdminResponse] = self._loop.create_future()
        self._commands.put(lambda: self._administration.begin(request, answer, time.monotonic()))
        return await answer

    def submit(self, link: GatewayLink, arrival: Arrival) -> None:
        """Queue a request; a refusal comes as output."""
        self._commands.put(lambda: self._submit(link, arrival))

    def cancel(self, link: GatewayLink, cancel: engine_pb2.Cancel) -> None:
        """End a request of this link."""
        self._commands.put(lambda: self._cancel(link, cancel))

    def drop(self, link: GatewayLink) -> None:
        """End all requests of a link that is gone."""
        self._commands.put(lambda: self._drop(link))

    def wake(self) -> None:
        """Let the loop look at the block manager's answers."""
        self._commands.put(lambda: None)

    async def drain(self) -> None:
        """Refuse new requests, and return when none is live."""
        self._commands.put(self._begin_drain)
        await self._empty.wait()

    async def stop(self) -> None:
        """Let `run` return after its present turn, with an end for every live request; wait until it has."""
        self._commands.put(self._stop)
        await self._ended.wait()

    async def abandon(self) -> None:
        """Let `run` return after its present turn, and wait until it has.

        Live requests get no end: their links break, by which gateways see that the engine failed.
        """
        self._commands.put(self._abandon)
        await self._ended.wait()

    def run(self) -> None:
        """Turn the engine until stopped; sleep while a turn moves nothing."""
        try:
            self._run()
        finally:
            self._call(self._ended.set)

    # On the engine's thread.

    def _run(self) -> None:
        while not self._stopping:
            if self._take_commands():
                self._figures = self._count()
            turn = self._engine.turn()
            turned, computed = time.monotonic(), self._figures.totals.computed_tokens
            self._watch_kvmanager()  # after the turn, which has taken in what became of it
            if self._engine.last_failure is not None:
                log.error("a step failed", exc_info=self._engine.last_failure)
                self._engine.last_failure = None
            self._figures = self._count()  # they go with the news
            self._deliver([*turn.outputs, *self._engine.scheduler.take_outputs()])
            if turn.step is not None:
                self._tell_step(turn.step, self._figures.totals.computed_tokens - computed, time.monotonic() - turned)
            self._administration.look()
            if self._draining and self._engine.scheduler.empty:
                self._call(self._empty.set)
            if not turn.progressed:
                self._sleep()
        if not self._abandoned:
            self._engine.scheduler.cancel_all()
            self._deliver(self._engine.scheduler.take_outputs())

    def _take_commands(self) -> bool:
        """Do what was asked for; return whether anything was."""
        any_were = False
        while not self._commands.empty():
            self._commands.get()()
            any_were = True
        return any_were

    def _count(self) -> EngineFigures:
        scheduler = self._engine.scheduler
        return EngineFigures(
            scheduler.running,
            scheduler.waiting,
            replace(scheduler.totals),
            scheduler.uncomputed_tokens,
            scheduler.available_blocks,
            deferred=scheduler.deferred if self._engine.blocks.ready else scheduler.waiting,
        )

    def _tell_step(self, times: StepTimes, tokens: int, delivering: float) -> None:
        waited, self._waited = self._waited, 0.0
        publish = times.publish + delivering
        step = StepFigures(tokens, times.ran, times.plan, waited, times.forward, times.sample, publish)
        self._observer.stepped(step)

    def _sleep(self) -> None:
        counts_down = self._without_kvmanager_since is not None and not self.without_kvmanager
        waits = counts_down or (self.without_kvmanager and not self._engine.scheduler.empty)
        begun, any_live = time.monotonic(), self._engine.scheduler.running or self._engine.scheduler.waiting
        try:
            command = self._commands.get(timeout=_POLL_SECONDS_WITHOUT_KVMANAGER if waits else None)
        except queue.Empty:
            return
        finally:
            self._waited += time.monotonic() - begun if any_live else 0.0
        command()

    def _watch_kvmanager(self) -> None:
        now, since = time.monotonic(), self._without_kvmanager_since
        self._without_kvmanager_since = None if self._engine.blocks.ready else now if since is None else since
        away = self._without_kvmanager_since is not None and now - self._without_kvmanager_since > self._patience
        if away != self.without_kvmanager:
            self.without_kvmanager = away
            for changed in self._watchers:
                self._call(changed)
        if away:
            detail = f"the engine has been without its KV manager for more than {self._patience:g} s"
            self._engine.scheduler.fail_all(Failure.BLOCK_MANAGER, detail)

    def _submit(self, link: GatewayLink, arrival: Arrival) -> None:
        submission, at = arrival.submission, arrival.at
        # What is still to be told of an ended request belongs to its owner, not to a new one of the same id.
        self._write_all(self._engine.scheduler.take_outputs())
        try:
            self._engine.scheduler.submit(request_of(submission, self._eos_token_ids, at, arrival.constraint))
        except RequestRefused as refused:
            self._refuse(link, arrival, refused)
        except Exception as fault:
            log.exception("request %s could not be read", submission.request_id)
            self._refuse(link, arrival, SubmissionFailed(f"the engine failed at reading it: {fault!r}"))
        else:
            self._owners[submission.request_id] = _Owner(link, submission.attempt, at, self.steps)
            self._report(partial(self.reports.began, submission, at))

    def _refuse(self, link: GatewayLink, arrival: Arrival, refused: RequestRefused) -> None:
        self._output(link).refused.append(refused_message(arrival.submission, refused))
        self._report(partial(self.reports.refused, arrival.submission, refused, arrival.at))

    def _report(self, report: Callable[[], None]) -> None:
        """Tell what only watches: that it cannot take it is no reason to end anything."""
        try:
            report()
        except Exception:
            log.exception("a request could not be reported")

    def _cancel(self, link: GatewayLink, cancel: engine_pb2.Cancel) -> None:
        owner = self._owners.get(cancel.request_id)
        if owner and owner.link is link and owner.attempt == cancel.attempt:
            if cancel.HasField("sample"):
                self._engine.scheduler.end_sample(cancel.request_id, cancel.sample)
            else:
                self._engine.scheduler.cancel(cancel.request_id)

    def _drop(self, link: GatewayLink) -> None:
        for request_id in [request_id for request_id, owner in self._owners.items() if owner.link is link]:
            self._engine.scheduler.cancel(request_id)

    def _begin_drain(self) -> None:
        self._draining = self._engine.scheduler.draining = True

    def _stop(self) -> None:
        self._stopping = True

    def _abandon(self) -> None:
        self._stopping = self._abandoned = True

    def _deliver(self, outputs: list[Output]) -> None:
        self._write_all(outputs)
        news, self._news = self._news, {}
        for link, message in news.items():
            message.step = self.steps
            self._call(partial(link.push, message))
            if any(started.isolated for started in message.started):
                self._wait_until_sent(link)

    def _wait_until_sent(self, link: GatewayLink) -> None:
        """Give the gateway its news before the next turn: should that end the process, it has to know by which request.

        Where the stream is held up, the request is computed all the same, a moment later.
        """
        sent = threading.Event()
        self._call(partial(link.when_sent, sent.set))
        if not sent.wait(_LONGEST_ANNOUNCEMENT_SECONDS):
            log.warning("a gateway was not told in time which request runs isolated")

    def _call(self, callback: Callable[[], None]) -> None:
        """Call on the event loop. When that is closed, nobody waits for it any more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback)

    def _output(self, link: GatewayLink) -> engine_pb2.StepOutput:
        return self._news.setdefault(link, engine_pb2.StepOutput())

    def _write_all(self, outputs: list[Output]) -> None:
        for output in outputs:
            try:
                self._write(output)
            except Exception as fault:
                log.exception("what request %s brought could not be written", output.request_id)
                self._unwritten[output.request_id] = f"the engine failed at writing what it brought: {fault!r}"
                self._end_unwritten(output, fault)
                self._write_all(self._engine.scheduler.take_outputs())

    def _end_unwritten(self, output: Output, fault: Exception) -> None:
        """End a request whose outputs cannot be written, unless it has ended: then its end says so when it comes."""
        if isinstance(output, Finished):
            self._write(output)
        else:
            self._engine.scheduler.fail_request(output.request_id, fault)

    def _write(self, output: Output) -> None:
        owner = self._owners[output.request_id]
        if output.request_id in self._unwritten and not isinstance(output, Finished):
            return
        message = self._output(owner.link)
        names = {"request_id": output.request_id, "attempt": owner.attempt}
        match output:
            case Started():
                message.started.add(**names, cached_tokens=output.cached_tokens, isolated=output.isolated)
            case Scored():
                logprobs = token_logprobs(output.tokens)
                message.prompts.add(**names, first_position=output.position, logprobs=logprobs)
            case Tokens():
                end = output.end and sample_end(output.end)
                token_ids, logprobs = output.token_ids, token_logprobs(output.tokens)
                message.tokens.add(**names, sample=output.sample, token_ids=token_ids, logprobs=logprobs, end=end)
            case Finished(group=group):
                finished = self._finished_message(group, owner)
                del self._owners[output.request_id]
                message.finished.append(finished)
                if group.fault is not None:
                    log.error("request %s failed", output.request_id, exc_info=group.fault)
                self._report(partial(self.reports.ended, group, finished, owner.submitted_at))
                self._report(partial(self._recorder.ended, group, owner.arrival_step, self.steps))

    def _finished_message(self, group: Group, owner: _Owner) -> engine_pb2.RequestFinished:
        if (detail := self._unwritten.pop(group.request.request_id, None)) is not None:
            return failed_message(group, owner.attempt, detail)
        return finished_message(group, owner.attempt, owner.submitted_at, time.monotonic())
