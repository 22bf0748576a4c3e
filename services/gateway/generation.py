"""One request from submission to its end: turns events of engines into responses for the client."""

import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from quire.v1 import decoding_pb2, engine_pb2, gateway_pb2
from services.gateway.attempts import RequestAttempts
from services.gateway.delta_encoder import DeltaEncoder
from services.gateway.fleet.engine_events import (
    EventBatch,
    Failover,
    FailoverReason,
    deadline_error,
    failover_after_finish,
    failover_after_refusal,
    failure_error,
)
from services.gateway.fleet.request_stream import EngineDisconnected
from services.gateway.observe.observer import RequestObserver
from services.gateway.prepared_request import PreparedRequest
from services.gateway.sample_output import SampleOutput
from services.gateway.text.text_stream import TextStream
from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    ServiceError,
    SlowClient,
    Unavailable,
)
from services.wire.duration import duration

_CANCEL_REASONS: dict[type[BaseException] | None, engine_pb2.CancelReason.ValueType] = {
    DeadlineExceeded: engine_pb2.CANCEL_REASON_DEADLINE,
    SlowClient: engine_pb2.CANCEL_REASON_SLOW_CLIENT,
}
# Prompt positions in one response; with the largest number of log-probabilities that is about 250 kB.
_MAX_POSITIONS = 1024

Response = gateway_pb2.GenerateResponse
EncodedResponse = Response | bytes

_NO_TOKENS = engine_pb2.SampleTokens()

log = logging.getLogger("quire.gateway")


class Writer(Protocol):
    """Writes responses to a client."""

    @property
    def ready(self) -> bool:
        """Whether the response before has left."""

    def begin(self, message: EncodedResponse, /) -> None:
        """Begin to write a response while `ready`."""


class Generation:
    """A request in progress. On exit of its context the engine is released. `clock` is in seconds."""

    def __init__(self, request: PreparedRequest, attempts: RequestAttempts, clock: Callable[[], float]) -> None:
        self.request = request
        self._attempts = attempts
        self._clock = clock
        asked, tokenizer = request.request, request.model.tokenizer
        self._samples = [
            SampleOutput(
                TextStream(tokenizer, asked.stopping, asked.output.special_tokens), asked.stopping.include_stop
            )
            for _ in request.submission.samples
        ]
        self._stopped_samples = 0  # ended by a stop string
        self._finished = False  # the engine has sent RequestFinished
        self._next_prompt_position = 1  # log-probabilities before it have been sent

    def write_tokens(self, writer: Writer, observer: RequestObserver) -> None:
        """Write tokens as they arrive from the engine while `responses` waits for events: no task wakes up for them.

        Not with stop strings, because a task has to cancel the request at one, and not with log-probabilities.
        """
        asked = self.request.request
        if not asked.stopping.stop_strings and not asked.output.HasField("logprobs"):
            encoders = [DeltaEncoder(index) for index in range(len(self._samples))]
            self._attempts.receive_tokens(partial(self._write_tokens, writer, observer, encoders))

    def _write_tokens(
        self,
        writer: Writer,
        observer: RequestObserver,
        encoders: Sequence[DeltaEncoder],
        tokens: engine_pb2.SampleTokens,
    ) -> bool:
        """Write tokens at once; False if the client is behind, or if they end their sample."""
        if not writer.ready or tokens.HasField("end"):
            return False
        index, token_ids = tokens.sample, tokens.token_ids[:]
        sample, count = self._samples[index], len(token_ids)
        if not sample.ended and count:
            self._on_tokens()
            text = sample.add_inner(token_ids)
            self.request.progress.generated_tokens += count
            observer.on_tokens(index, count, self._clock())
            writer.begin(encoders[index].encode(text, token_ids))
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._attempts.release(None if self._finished else _CANCEL_REASONS.get(kind, engine_pb2.CANCEL_REASON_CLIENT))

    async def responses(self) -> AsyncGenerator[Response, None]:
        """Yield Started, Deltas and Finished. Raises a ServiceError if the request fails."""
        try:
            finished = None
            while finished is None:
                batch = await self._next_batch()
                for response in self._responses(batch):
                    yield response
                finished = batch.finished
                if finished is None and self._stopped_samples == len(self._samples):
                    finished = await self._stop()
            self._finished = True
            self._check_failure(finished)
            yield self._finish(finished)
        except ServiceError:
            raise
        except Exception as error:
            log.exception("request %s failed", self.request.request.request_id)
            raise GenerationFailed(f"internal error of the gateway: {type(error).__name__}") from error

    def on_slow_client(self) -> None:
        """Cancel the request at the engine because its client does not read."""
        self._attempts.cancel(engine_pb2.CANCEL_REASON_SLOW_CLIENT)

    def _responses(self, batch: EventBatch) -> Iterator[Response]:
        if batch.started is not None:
            self._attempts.on_started(batch.started)
            if not self.request.progress.started:
                yield self._start(batch.started)
        for scores in batch.prompts:
            for part in self._prompt_logprobs(scores):
                yield Response(prompt_logprobs=part)
        for index in range(len(self._samples)) if batch.finished else sorted(batch.tokens):
            end = batch.finished and batch.finished.samples[index]
            if delta := self._delta(index, batch.tokens.get(index, _NO_TOKENS), end):
                yield delta

    async def _next_batch(self) -> EventBatch:
        """Wait for the next events, failing over to another engine if necessary."""
        while True:
            try:
                batch = EventBatch.of(await self._attempts.next_events())
            except TimeoutError as error:
                raise deadline_error(started=self.request.progress.started) from error
            except EngineDisconnected:
                if all(sample.ended for sample in self._samples):
                    return EventBatch(finished=self._substitute_finish())
                lost = Unavailable("the engine was lost during the request")
                failover: Failover | None = Failover(FailoverReason.LOST, lost)
            else:
                failover = self._failover(batch)
            if failover is None:
                return batch
            await self._attempts.fail_over(failover, [sample.state() for sample in self._samples])

    def _failover(self, batch: EventBatch) -> Failover | None:
        """Return the failover that the events require, if any. Raises errors that every engine would repeat."""
        if batch.refused is not None:
            failover = failover_after_refusal(batch.refused)
            return Failover(failover.reason, self.request.overflow_of(failover.error))
        return batch.finished and failover_after_finish(batch.finished, [not sample.ended for sample in self._samples])

    def _start(self, started: engine_pb2.RequestStarted) -> Response:
        request, progress = self.request, self.request.progress
        progress.cached_tokens, progress.started = started.cached_tokens, True
        message = gateway_pb2.Started(
            request_id=request.request.request_id,
            model=request.model.name,
            prompt_tokens=progress.prompt_tokens,
            cached_tokens=started.cached_tokens,
            sampling=request.request.sampling,
            max_tokens=request.submission.stopping.max_tokens,
            prompt_token_ids=request.submission.prompt_token_ids if request.request.output.prompt_token_ids else (),
            model_defaults=request.model_defaults,
            warnings=started.warnings,
            in_thought=request.in_thought,
        )
        return Response(started=message)

    def _prompt_logprobs(self, scores: engine_pb2.PromptScores) -> Iterator[gateway_pb2.PromptLogprobs]:
        """Yield the log-probabilities not sent yet: after a failover the engine reports all positions again."""
        skipped = max(0, self._next_prompt_position - scores.first_position)
        for start in range(skipped, len(scores.logprobs), _MAX_POSITIONS):
            part = scores.logprobs[start : start + _MAX_POSITIONS]
            first = scores.first_position + start
            self._next_prompt_position = first + len(part)
            yield gateway_pb2.PromptLogprobs(first_position=first, logprobs=part)

    def _delta(
        self, index: int, tokens: engine_pb2.SampleTokens, finished: engine_pb2.SampleEnd | None
    ) -> Response | None:
        """Return a sample's new tokens and text, if any; `finished` is its end in RequestFinished."""
        sample = self._samples[index]
        if sample.ended:
            return None
        token_ids = tokens.token_ids[:]
        if token_ids:
            self._on_tokens()
        end = tokens.end if tokens.HasField("end") else finished
        counted, text = sample.add(token_ids, end)
        if sample.stop is not None:
            self._stopped_samples += 1
            if end is None and len(self._samples) > 1:
                self._attempts.cancel(engine_pb2.CANCEL_REASON_STOP_STRING, index)
        self.request.progress.generated_tokens += len(counted)
        if not counted and not text:
            return None
        return _delta_response(index, text, counted, tokens.logprobs[: len(counted)])

    def _on_tokens(self) -> None:
        if self._attempts.gained:
            return
        self._attempts.on_tokens()
        if self.request.progress.first_token_at is None:
            self.request.progress.first_token_at = self._clock()
            self.request.span.add_event("first token")

    async def _stop(self) -> engine_pb2.RequestFinished:
        """Cancel the request at the engine, and wait for its RequestFinished."""
        self._attempts.cancel(engine_pb2.CANCEL_REASON_STOP_STRING)
        try:
            while True:
                batch = EventBatch.of(await self._attempts.next_events())
                if batch.finished is not None:
                    return batch.finished
        except TimeoutError as error:
            raise deadline_error(started=self.request.progress.started) from error
        except EngineDisconnected:
            return self._substitute_finish()

    def _substitute_finish(self) -> engine_pb2.RequestFinished:
        """Return the RequestFinished of a lost engine, all samples of which have ended."""
        stopped = engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_STOP)
        return engine_pb2.RequestFinished(samples=[sample.end or stopped for sample in self._samples])

    def _check_failure(self, finished: engine_pb2.RequestFinished) -> None:
        """Raise the error of a failed sample, unless a stop string had ended it."""
        ends = zip(finished.samples, self._samples, strict=True)
        if decoding_pb2.FINISH_REASON_FAILED in {end.reason for end, sample in ends if sample.stop is None}:
            raise failure_error(finished)

    def _finish(self, finished: engine_pb2.RequestFinished) -> Response:
        now, arrival, progress = self._clock(), self.request.arrival, self.request.progress
        progress.recomputed_tokens = finished.recomputed_tokens
        message = gateway_pb2.Finished(
            samples=[sample.finish(end) for end, sample in zip(finished.samples, self._samples, strict=True)],
            usage=gateway_pb2.Usage(
                prompt_tokens=progress.prompt_tokens,
                cached_tokens=progress.cached_tokens,
                generated_tokens=progress.generated_tokens,
                recomputed_tokens=finished.recomputed_tokens,
                swapped_tokens=finished.swapped_tokens,
            ),
            timing=gateway_pb2.Timing(
                queued=finished.queued,
                prefill=finished.prefill,
                decode=finished.decode,
                time_to_first_token=duration((progress.first_token_at or now) - arrival),
                total=duration(now - arrival),
                preemptions=finished.preemptions,
                failovers=progress.failovers,
            ),
        )
        return Response(finished=message)


def _delta_response(
    index: int, text: str, token_ids: list[int], logprobs: list[decoding_pb2.TokenLogprobs]
) -> Response:
    """Fill in the fields one by one, in half the time of the constructors of Response and Delta."""
    response = Response()
    delta = response.delta
    delta.sample, delta.text = index, text
    delta.token_ids.extend(token_ids)
    if logprobs:
        delta.logprobs.extend(logprobs)
    return response
