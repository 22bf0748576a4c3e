"""One request from submission to its end: engine events in, the client's messages out."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.duration import duration
from services.errors import (
    GenerationFailed,
    InvalidField,
    Overloaded,
    RequestIsLive,
    ServiceError,
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
}

Response = gateway_pb2.GenerateResponse


@dataclass
class _News:
    """What a batch of events says, in the order in which a client hears of it."""

    started: engine_pb2.RequestStarted | None
    token_ids: list[int]
    finished: engine_pb2.RequestFinished | None

    @classmethod
    def of(cls, events: list[Event]) -> "_News":
        news = cls(None, [], None)
        for event in events:
            match event:
                case engine_pb2.RequestStarted():
                    news.started = event
                case engine_pb2.SampleTokens():
                    news.token_ids += event.token_ids
                case engine_pb2.RequestFinished():
                    news.finished = event
                case engine_pb2.RequestRefused():
                    raise _REFUSALS.get(event.reason, GenerationFailed)(event.detail, event.field)
        return news


@dataclass
class Generation:
    """A request that the engine works on. `arrival` and `clock` are in seconds; the deadline is `arrival` + timeout."""

    link: EngineLink
    ticket: Ticket
    parameters: Parameters
    model: str
    text: TextStream
    arrival: float
    clock: Callable[[], float]
    cached_tokens: int = 0
    generated_tokens: int = 0
    first_token_at: float | None = None

    async def responses(self) -> AsyncGenerator[Response, None]:
        """Yield Started, Deltas and Finished. Raises the ServiceError that the request ended with.

        Left early, for whatever reason, it ends the request at the engine.
        """
        finished = None
        try:
            while finished is None:
                news = _News.of(await self.ticket.next_events(self._deadline()))
                if news.started is not None:
                    yield self._started(news.started)
                delta, stop = self._delta(news)
                if delta is not None:
                    yield Response(delta=delta)
                finished = news.finished
                if stop is not None:
                    yield self._finished(await self._stop(finished), stop)
                    return
            _check_ended_well(finished)
            yield self._finished(finished, None)
        finally:
            if finished is None:
                self.link.cancel(self.ticket, engine_pb2.CANCEL_REASON_CLIENT)
            self.link.forget(self.ticket)

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

    def _delta(self, news: _News) -> tuple[gateway_pb2.Delta | None, str | None]:
        """Return the new tokens and their text, if there are any, and the stop string that they ran into."""
        token_ids = news.token_ids
        if token_ids and self.first_token_at is None:
            self.first_token_at = self.clock()
        piece = self.text.push(self._visible(news))
        text, stop = piece.text, piece.stop
        if stop is not None:
            token_ids = token_ids[: piece.token_count]
        elif news.finished is not None:
            rest = self.text.finish()
            text, stop = text + rest.text, rest.stop
        self.generated_tokens += len(token_ids)
        if not token_ids and not text:
            return None, stop
        return gateway_pb2.Delta(text=text, token_ids=token_ids), stop

    def _visible(self, news: _News) -> list[int]:
        """Leave out the token that ended the sample, unless the client wants to see it."""
        ended_by_token = news.finished is not None and news.finished.samples[0].HasField("stop_token_id")
        hidden = ended_by_token and not self.parameters.stopping.include_stop
        return news.token_ids[:-1] if hidden else news.token_ids

    async def _stop(self, finished: engine_pb2.RequestFinished | None) -> engine_pb2.RequestFinished:
        """End the request at the engine, unless it has ended there already, and return how it did."""
        if finished is None:
            self.link.cancel(self.ticket, engine_pb2.CANCEL_REASON_STOP_STRING)
        while finished is None:
            finished = _News.of(await self.ticket.next_events(self._deadline())).finished
        return finished

    def _finished(self, finished: engine_pb2.RequestFinished, stop: str | None) -> Response:
        now = self.clock()
        prompt = len(self.ticket.submission.prompt_token_ids)
        message = gateway_pb2.Finished(
            samples=[_sample_finish(finished.samples[0], stop)],
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


def _check_ended_well(finished: engine_pb2.RequestFinished) -> None:
    reason = finished.samples[0].reason
    if reason == decoding_pb2.FINISH_REASON_FAILED:
        raise _FAILURES.get(finished.failure, GenerationFailed)(finished.detail)
    if reason == decoding_pb2.FINISH_REASON_CANCELLED:
        raise Unavailable("the engine is shutting down")


def _sample_finish(end: engine_pb2.SampleEnd, stop: str | None) -> gateway_pb2.SampleFinish:
    if stop is not None:
        return gateway_pb2.SampleFinish(reason=decoding_pb2.FINISH_REASON_STOP, stop_string=stop)
    finish = gateway_pb2.SampleFinish(reason=end.reason)
    if end.HasField("stop_token_id"):
        finish.stop_token_id = end.stop_token_id
    return finish
