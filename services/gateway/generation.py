"""One request from submission to its end: engine events in, the client's messages out."""

from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.duration import duration
from services.errors import (
    DeadlinePassed,
    GenerationFailed,
    InvalidField,
    Overloaded,
    RequestIsLive,
    ServiceError,
    SlowClient,
    Unavailable,
    UnsupportedField,
)
from services.gateway.engine_link import EngineLink, Event, Ticket
from services.gateway.parameters import Parameters
from services.gateway.text_stream import TextStream

_REFUSALS: dict[int, type[ServiceError]] = {
    engine_pb2.REFUSAL_REASON_ALREADY_EXISTS: RequestIsLive,
    engine_pb2.REFUSAL_REASON_INVALID: InvalidField,
    engine_pb2.REFUSAL_REASON_QUEUE_FULL: Overloaded,
    engine_pb2.REFUSAL_REASON_UNAVAILABLE: Unavailable,
    engine_pb2.REFUSAL_REASON_UNIMPLEMENTED: UnsupportedField,
}
_FAILURES: dict[int, type[ServiceError]] = {
    engine_pb2.FAILURE_REASON_STEP: GenerationFailed,
    engine_pb2.FAILURE_REASON_BLOCK_MANAGER: Unavailable,
    engine_pb2.FAILURE_REASON_DEADLINE: DeadlinePassed,
    engine_pb2.FAILURE_REASON_DEADLINE_QUEUED: DeadlinePassed,
    engine_pb2.FAILURE_REASON_CONSTRAINT: InvalidField,
}
_BLAMED = {
    engine_pb2.FAILURE_REASON_DEADLINE: "timeout",
    engine_pb2.FAILURE_REASON_DEADLINE_QUEUED: "timeout",
    engine_pb2.FAILURE_REASON_CONSTRAINT: "constraint",
}
_CANCEL_REASONS = {
    DeadlinePassed: engine_pb2.CANCEL_REASON_DEADLINE,
    SlowClient: engine_pb2.CANCEL_REASON_SLOW_CLIENT,
}

# What a client gets in one message; with all that can be asked for, that is some 250 kB.
_MOST_POSITIONS = 1024

Response = gateway_pb2.GenerateResponse


@dataclass
class _News:
    """What a batch of events says, in the order in which a client hears of it."""

    started: engine_pb2.RequestStarted | None = None
    prompts: list[engine_pb2.PromptScores] = field(default_factory=list)
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by sample
    logprobs: dict[int, list[decoding_pb2.TokenLogprobs]] = field(default_factory=dict)
    ends: dict[int, engine_pb2.SampleEnd] = field(default_factory=dict)
    finished: engine_pb2.RequestFinished | None = None

    @classmethod
    def of(cls, events: list[Event]) -> "_News":
        news = cls()
        for event in events:
            match event:
                case engine_pb2.RequestStarted():
                    news.started = event
                case engine_pb2.PromptScores():
                    news.prompts.append(event)
                case engine_pb2.SampleTokens():
                    news.token_ids.setdefault(event.sample, []).extend(event.token_ids)
                    news.logprobs.setdefault(event.sample, []).extend(event.logprobs)
                    if event.HasField("end"):
                        news.ends[event.sample] = event.end
                case engine_pb2.RequestFinished():
                    news.finished = event
                case engine_pb2.RequestRefused():
                    raise _REFUSALS.get(event.reason, GenerationFailed)(event.detail, event.field)
        return news


@dataclass
class SampleText:
    """The text of one sample, and the stop string that it ran into."""

    text: TextStream
    ended: bool = False
    stop: str | None = None


@dataclass
class Generation:
    """A request that the engine works on. `arrival` and `clock` are in seconds; the deadline is `arrival` + timeout."""

    link: EngineLink
    ticket: Ticket
    parameters: Parameters
    model: str
    samples: list[SampleText]
    arrival: float
    clock: Callable[[], float]
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_at: float | None = None

    async def responses(self) -> AsyncGenerator[Response, None]:
        """Yield Started, Deltas and Finished. Raises the ServiceError that the request ended with.

        Left early, for whatever reason, it ends the request at the engine.
        """
        finished, reason = None, engine_pb2.CANCEL_REASON_CLIENT
        try:
            while finished is None:
                news = _News.of(await self.ticket.next_events(self._deadline()))
                if news.started is not None:
                    yield self._started(news.started)
                for scores in news.prompts:
                    for part in _prompt_logprobs(scores):
                        yield Response(prompt_logprobs=part)
                for index in range(len(self.samples)):
                    if delta := self._delta(index, news):
                        yield Response(delta=delta)
                finished = news.finished
                if finished is None and all(sample.stop is not None for sample in self.samples):
                    finished = await self._stop()
            self._check_ended_well(finished)
            yield self._finished(finished)
        except (DeadlinePassed, SlowClient) as error:
            reason = _CANCEL_REASONS[type(error)]
            raise
        finally:
            if finished is None:
                self.link.cancel(self.ticket, reason)
            self.link.forget(self.ticket)

    def client_is_slow(self) -> None:
        """End the request at the engine: its client does not read."""
        self.link.cancel(self.ticket, engine_pb2.CANCEL_REASON_SLOW_CLIENT)

    def _deadline(self) -> float | None:
        timeout = self.parameters.timeout
        return None if timeout is None else self.arrival + timeout

    def _started(self, started: engine_pb2.RequestStarted) -> Response:
        self.cached_tokens = started.cached_tokens
        message = gateway_pb2.Started(
            request_id=self.parameters.request_id,
            model=self.model,
            prompt_tokens=len(self.ticket.submission.prompt_token_ids),
            cached_tokens=started.cached_tokens,
            sampling=self.parameters.sampling,
            max_tokens=self.ticket.submission.stopping.max_tokens,
        )
        return Response(started=message)

    def _delta(self, index: int, news: _News) -> gateway_pb2.Delta | None:
        """Return a sample's new tokens and their text, if there are any."""
        sample, token_ids = self.samples[index], news.token_ids.get(index, [])
        if sample.ended:
            return None
        if token_ids and self.first_token_at is None:
            self.first_token_at = self.clock()
        end = news.ends.get(index) or (news.finished and news.finished.samples[index])
        piece = sample.text.push(self._visible(token_ids, end))
        text, sample.stop = piece.text, piece.stop
        if sample.stop is not None:
            token_ids = token_ids[: piece.token_count]
        elif end is not None:
            rest = sample.text.finish()
            text, sample.stop = text + rest.text, rest.stop
        self._note_end(index, end)
        self.generated_tokens += len(token_ids)
        if not token_ids and not text:
            return None
        logprobs = news.logprobs.get(index, [])[: len(token_ids)]
        return gateway_pb2.Delta(sample=index, text=text, token_ids=token_ids, logprobs=logprobs)

    def _note_end(self, index: int, end: engine_pb2.SampleEnd | None) -> None:
        sample = self.samples[index]
        sample.ended = end is not None or sample.stop is not None
        if sample.stop is not None and end is None and len(self.samples) > 1:
            self.link.cancel(self.ticket, engine_pb2.CANCEL_REASON_STOP_STRING, index)

    def _visible(self, token_ids: list[int], end: engine_pb2.SampleEnd | None) -> list[int]:
        """Leave out the token that ended the sample, unless the client wants to see it."""
        ended_by_token = end is not None and end.HasField("stop_token_id")
        hidden = ended_by_token and not self.parameters.stopping.include_stop
        return token_ids[:-1] if hidden else token_ids

    async def _stop(self) -> engine_pb2.RequestFinished:
        """End the request at the engine, and return how it did."""
        self.link.cancel(self.ticket, engine_pb2.CANCEL_REASON_STOP_STRING)
        while True:
            finished = _News.of(await self.ticket.next_events(self._deadline())).finished
            if finished is not None:
                return finished

    def _check_ended_well(self, finished: engine_pb2.RequestFinished) -> None:
        """Raise what the request failed with, unless its texts have ended already."""
        reasons = {
            end.reason for end, sample in zip(finished.samples, self.samples, strict=True) if sample.stop is None
        }
        if decoding_pb2.FINISH_REASON_FAILED in reasons:
            failure = _FAILURES.get(finished.failure, GenerationFailed)
            raise failure(finished.detail, _BLAMED.get(finished.failure, ""))
        if decoding_pb2.FINISH_REASON_CANCELLED in reasons:
            raise Unavailable("the engine is shutting down")

    def _finished(self, finished: engine_pb2.RequestFinished) -> Response:
        now = self.clock()
        prompt = len(self.ticket.submission.prompt_token_ids)
        message = gateway_pb2.Finished(
            samples=[
                _sample_finish(end, sample.stop) for end, sample in zip(finished.samples, self.samples, strict=True)
            ],
            usage=gateway_pb2.Usage(
                prompt_tokens=prompt,
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
            ),
        )
        return Response(finished=message)


def _prompt_logprobs(scores: engine_pb2.PromptScores) -> Iterator[gateway_pb2.PromptLogprobs]:
    for start in range(0, len(scores.logprobs), _MOST_POSITIONS):
        yield gateway_pb2.PromptLogprobs(
            first_position=scores.first_position + start, logprobs=scores.logprobs[start : start + _MOST_POSITIONS]
        )


def _sample_finish(end: engine_pb2.SampleEnd, stop: str | None) -> gateway_pb2.SampleFinish:
    if stop is not None:
        return gateway_pb2.SampleFinish(reason=decoding_pb2.FINISH_REASON_STOP, stop_string=stop)
    finish = gateway_pb2.SampleFinish(reason=end.reason, score=end.score if end.HasField("score") else None)
    if end.HasField("stop_token_id"):
        finish.stop_token_id = end.stop_token_id
    return finish
