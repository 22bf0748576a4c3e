"""One request from submission to its end: engine events in, the client's messages out."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.gateway.fleet.dispatch import Dispatcher, Placement
from services.gateway.fleet.engine_link import EngineLink, Event, LinkBroke
from services.gateway.fleet.engine_news import Loss, LossReason, News, abandonment, failure, late, refusal
from services.gateway.fleet.fleet import ServedModel
from services.gateway.fleet.lost_engines import LostEngines
from services.gateway.parameters import Parameters
from services.gateway.text.text_stream import TextStream
from services.runtime.errors import (
    DeadlinePassed,
    GenerationFailed,
    RequestGivenUp,
    ServiceError,
    SlowClient,
    Unavailable,
)
from services.runtime.tracing import NO_SPAN, Span
from services.wire.duration import duration

_CANCEL_REASONS = {
    DeadlinePassed: engine_pb2.CANCEL_REASON_DEADLINE,
    SlowClient: engine_pb2.CANCEL_REASON_SLOW_CLIENT,
}
# What a client gets in one message; with all that can be asked for, that is some 250 kB.
_MOST_POSITIONS = 1024
# An engine that refused may have room again, without saying so.
_LOOK_AGAIN_SECONDS = 0.2

Response = gateway_pb2.GenerateResponse

log = logging.getLogger("quire.gateway")


@dataclass
class SampleText:
    """One sample: its tokens as the engines told them, its text, and how it ended."""

    text: TextStream
    token_ids: list[int] = field(default_factory=list)
    end: engine_pb2.SampleEnd | None = None
    stop: str | None = None  # the stop string that ended it

    @property
    def ended(self) -> bool:
        """Whether nothing more comes."""
        return self.end is not None or self.stop is not None


@dataclass(frozen=True)
class FailoverLimits:
    """How often a request may go on at another engine, and how many seconds it waits for one."""

    times: int
    seconds: float


@dataclass
class Generation:
    """A request that engines work on, one after the other where one cannot go on.

    `submission` is what the first engine gets. `arrival` and `clock` are in seconds; the deadline is `arrival` and the
    timeout.
    """

    dispatcher: Dispatcher
    model: ServedModel
    submission: engine_pb2.Submission
    parameters: Parameters
    samples: list[SampleText]
    limits: FailoverLimits
    arrival: float
    clock: Callable[[], float]
    span: Span = NO_SPAN
    engine_id: str = ""  # of the latest engine
    attempts: int = 0  # submissions that an engine was sent
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0  # known at the end
    first_token_at: float | None = None
    failovers: int = 0
    _lost: LostEngines = field(default_factory=LostEngines)
    _placement: Placement | None = None
    _started_told: bool = False
    _prompt_told: int = 1  # the prompt's positions before this one have been told
    _refused_by: set[EngineLink] = field(default_factory=set)
    _wait_until: float | None = None  # for an engine, since one was lost

    async def begin(self) -> str:
        """Give the request to an engine, and return the engine's id. Raises a ServiceError."""
        self._take(await self.dispatcher.place(self.model, self.submission, self.span))
        return self.engine_id

    def most_tokens(self) -> int:
        """Return the most tokens that it can use, prompt and answers together."""
        sequences = max(len(self.samples), self.submission.beam_search.width)
        # More than the context the engine refuses: until it has, nobody else is to be refused for so many tokens.
        answer = min(self.submission.stopping.max_tokens, self.model.description().context_tokens)
        return len(self.submission.prompt_token_ids) + sequences * answer

    def used_tokens(self) -> int:
        """Return the tokens used so far, prompt and answers together."""
        return (len(self.submission.prompt_token_ids) if self._started_told else 0) + self.generated_tokens

    async def responses(self) -> AsyncGenerator[Response, None]:
        """Yield Started, Deltas and Finished. Raises the ServiceError that the request ended with.

        Left early, for whatever reason, it ends the request at the engine.
        """
        finished, reason = None, engine_pb2.CANCEL_REASON_CLIENT
        try:
            while finished is None:
                news = await self._next_news()
                for response in self._told(news):
                    yield response
                finished = news.finished
                if finished is None and all(sample.stop is not None for sample in self.samples):
                    finished = await self._stop()
            self._check_ended_well(finished)
            yield self._finished(finished)
        except (DeadlinePassed, SlowClient) as error:
            reason = _CANCEL_REASONS[type(error)]
            raise
        except ServiceError:
            raise
        except Exception as error:
            log.exception("request %s failed", self.parameters.request_id)
            raise GenerationFailed(f"the gateway failed at this request: {type(error).__name__}") from error
        finally:
            self._leave(None if finished else reason)

    def client_is_slow(self) -> None:
        """End the request at the engine: its client does not read."""
        if self._placement is not None:
            self._placement.link.cancel(self._placement.ticket, engine_pb2.CANCEL_REASON_SLOW_CLIENT)

    def _told(self, news: News) -> Iterator[Response]:
        if news.started is not None:
            self._present().started(news.started.cached_tokens)
            self._lost.started(isolated=news.started.isolated)
            self._refused_by.clear()
            self._wait_until = None
            if not self._started_told:
                yield self._started(news.started)
        for scores in news.prompts:
            for part in self._prompt_logprobs(scores):
                yield Response(prompt_logprobs=part)
        for index in range(len(self.samples)):
            if delta := self._delta(index, news):
                yield Response(delta=delta)

    async def _next_news(self) -> News:
        """Wait for what the engine says next; where it cannot go on, have another one go on."""
        while True:
            try:
                news = News.of(await self._next_events())
            except LinkBroke:
                if all(sample.ended for sample in self.samples):
                    return News(finished=self._own_finish())
                loss = Loss(LossReason.LOST, Unavailable("the engine went away while it was answering"))
            else:
                if (found := self._loss(news)) is None:
                    return news
                loss = found
            await self._move(loss)

    async def _next_events(self) -> list[Event]:
        try:
            return await self._present().ticket.next_events(self._deadline())
        except TimeoutError as error:
            raise late(began=self._started_told) from error

    def _loss(self, news: News) -> Loss | None:
        """Return why the engine cannot go on with the request, if so. Raises what no engine could mend."""
        if news.refused is not None:
            return refusal(news.refused)
        return news.finished and abandonment(news.finished, [not sample.ended for sample in self.samples])

    async def _move(self, loss: Loss) -> None:
        """Submit the request to another engine, with what was generated. Raises the loss's error if that is no use."""
        left = self._present()
        self._leave(None, loss.reason.value)
        if loss.reason is LossReason.LOST:
            self._count_lost(left.engine_id)
        self._lost.left()
        if loss.reason in (LossReason.REFUSED, LossReason.NO_KV_MANAGER):
            self._refused_by.add(left.link)
        if loss.reason is not LossReason.REFUSED:
            self._count_failover(left.engine_id, loss)
        self._take(await self._place_again(loss))

    def _take(self, placement: Placement) -> None:
        self._placement, self.engine_id = placement, placement.engine_id
        self.attempts += 1

    def _count_lost(self, engine_id: str) -> None:
        try:
            self._lost.add(engine_id)
        except RequestGivenUp:
            self.dispatcher.given_up(self.model.name, self.submission.request_id, self._lost.engine_ids)
            raise

    def _count_failover(self, engine_id: str, loss: Loss) -> None:
        most = self.limits.times
        if self.failovers == most:
            told = f"{loss.error}; the request went on elsewhere {most} times already"
            raise Unavailable(told) if most else loss.error
        self.failovers += 1
        self._wait_until = None if loss.reason is LossReason.NO_KV_MANAGER else self.clock() + self.limits.seconds
        self.span.event("failover", {"quire.engine": engine_id, "quire.reason": loss.reason.value})
        self.dispatcher.failed_over(self.model.name, self.submission.request_id, engine_id, loss.reason)

    async def _place_again(self, loss: Loss) -> Placement:
        """Place the request at an engine that has not refused it; wait for one if the request was lost."""
        while True:
            try:
                return await self.dispatcher.place(self.model, self._resumption(), self.span, self._refused_by)
            except Unavailable as error:
                if self._wait_until is None:
                    raise loss.error from error
                if self.clock() >= self._wait_until:
                    waited = f"no other took the request in {self.limits.seconds:g} s"
                    raise Unavailable(f"{loss.error}; {waited}") from error
                await self._wait_for_engine(self._wait_until)
            self._refused_by.clear()

    async def _wait_for_engine(self, until: float) -> None:
        deadline = self._deadline()
        pause = min(until, self.clock() + _LOOK_AGAIN_SECONDS)
        if deadline is not None and deadline <= pause:
            pause = deadline
        with suppress(TimeoutError):
            async with asyncio.timeout_at(pause):
                await self.dispatcher.wait_for_change()
        if deadline is not None and self.clock() >= deadline:
            raise late(began=self._started_told)

    def _resumption(self) -> engine_pb2.Submission:
        """Return the submission that lets another engine go on where this client's text is."""
        submission = engine_pb2.Submission()
        submission.CopyFrom(self.submission)
        spent = self.clock() - self.arrival
        submission.attempt = self.attempts + 1
        submission.isolated = self._lost.isolated
        submission.age.CopyFrom(duration(spent))
        if self.parameters.timeout is not None:
            submission.timeout.CopyFrom(duration(max(0.0, self.parameters.timeout - spent)))
        del submission.samples[:]
        for sample in self.samples:
            submission.samples.add(generated_token_ids=sample.token_ids, ended=sample.ended)
        return submission

    def _present(self) -> Placement:
        assert self._placement is not None, "the request has begun"
        return self._placement

    def _leave(self, reason: engine_pb2.CancelReason.ValueType | None, fault: str = "") -> None:
        if self._placement is not None:
            self._placement.leave(reason, fault)
            self._placement = None

    def _deadline(self) -> float | None:
        timeout = self.parameters.timeout
        return None if timeout is None else self.arrival + timeout

    def _started(self, started: engine_pb2.RequestStarted) -> Response:
        self.cached_tokens, self._started_told = started.cached_tokens, True
        message = gateway_pb2.Started(
            request_id=self.parameters.request_id,
            model=self.model.name,
            prompt_tokens=len(self.submission.prompt_token_ids),
            cached_tokens=started.cached_tokens,
            sampling=self.parameters.sampling,
            max_tokens=self.submission.stopping.max_tokens,
        )
        return Response(started=message)

    def _prompt_logprobs(self, scores: engine_pb2.PromptScores) -> Iterator[gateway_pb2.PromptLogprobs]:
        """Yield what has not been told: an engine that goes on with a request begins with the prompt's first again."""
        skipped = max(0, self._prompt_told - scores.first_position)
        for start in range(skipped, len(scores.logprobs), _MOST_POSITIONS):
            part = scores.logprobs[start : start + _MOST_POSITIONS]
            first = scores.first_position + start
            self._prompt_told = first + len(part)
            yield gateway_pb2.PromptLogprobs(first_position=first, logprobs=part)

    def _delta(self, index: int, news: News) -> gateway_pb2.Delta | None:
        """Return a sample's new tokens and their text, if there are any."""
        sample, token_ids = self.samples[index], news.token_ids.get(index, [])
        if sample.ended:
            return None
        if token_ids and self.first_token_at is None:
            self.first_token_at = self.clock()
            self.span.event("first token")
        end = news.ends.get(index) or (news.finished and news.finished.samples[index])
        sample.token_ids += token_ids
        if token_ids:
            self._lost.gained_token()
        piece = sample.text.push(self._visible(token_ids, end))
        text, sample.stop = piece.text, piece.stop
        if sample.stop is not None:
            token_ids = token_ids[: piece.token_count]
        elif end is not None:
            rest = sample.text.finish()
            text, sample.stop = text + rest.text, rest.stop
        sample.end = end or None
        if sample.stop is not None and end is None and len(self.samples) > 1:
            self._present().end_sample(index)
        self.generated_tokens += len(token_ids)
        if not token_ids and not text:
            return None
        logprobs = news.logprobs.get(index, [])[: len(token_ids)]
        return gateway_pb2.Delta(sample=index, text=text, token_ids=token_ids, logprobs=logprobs)

    def _visible(self, token_ids: list[int], end: engine_pb2.SampleEnd | None) -> list[int]:
        """Leave out the token that ended the sample, unless the client wants to see it."""
        ended_by_token = end is not None and end.HasField("stop_token_id")
        hidden = ended_by_token and not self.parameters.stopping.include_stop
        return token_ids[:-1] if hidden else token_ids

    async def _stop(self) -> engine_pb2.RequestFinished:
        """End the request at the engine, and return how it did."""
        placement = self._present()
        placement.link.cancel(placement.ticket, engine_pb2.CANCEL_REASON_STOP_STRING)
        try:
            while True:
                news = News.of(await self._next_events())
                if news.finished is not None:
                    return news.finished
        except LinkBroke:
            return self._own_finish()

    def _own_finish(self) -> engine_pb2.RequestFinished:
        """Return what the engine would say if it still could: all samples have ended."""
        stopped = engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_STOP)
        return engine_pb2.RequestFinished(samples=[sample.end or stopped for sample in self.samples])

    def _check_ended_well(self, finished: engine_pb2.RequestFinished) -> None:
        """Raise what the request failed with, unless its texts have ended already."""
        reasons = {
            end.reason for end, sample in zip(finished.samples, self.samples, strict=True) if sample.stop is None
        }
        if decoding_pb2.FINISH_REASON_FAILED in reasons:
            raise failure(finished)

    def _finished(self, finished: engine_pb2.RequestFinished) -> Response:
        now = self.clock()
        self.recomputed_tokens = finished.recomputed_tokens
        message = gateway_pb2.Finished(
            samples=[
                _sample_finish(sample.end or end, sample.stop)
                for end, sample in zip(finished.samples, self.samples, strict=True)
            ],
            usage=gateway_pb2.Usage(
                prompt_tokens=len(self.submission.prompt_token_ids),
                cached_tokens=self.cached_tokens,
                generated_tokens=self.generated_tokens,
                recomputed_tokens=finished.recomputed_tokens,
                swapped_tokens=finished.swapped_tokens,
            ),
            timing=gateway_pb2.Timing(
                queued=finished.queued,
                prefill=finished.prefill,
                decode=finished.decode,
                time_to_first_token=duration((self.first_token_at or now) - self.arrival),
                total=duration(now - self.arrival),
                preemptions=finished.preemptions,
                failovers=self.failovers,
            ),
        )
        return Response(finished=message)


def _sample_finish(end: engine_pb2.SampleEnd, stop: str | None) -> gateway_pb2.SampleFinish:
    if stop is not None:
        return gateway_pb2.SampleFinish(reason=decoding_pb2.FINISH_REASON_STOP, stop_string=stop)
    finish = gateway_pb2.SampleFinish(reason=end.reason, score=end.score if end.HasField("score") else None)
    if end.HasField("stop_token_id"):
        finish.stop_token_id = end.stop_token_id
    return finish
