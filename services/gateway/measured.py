"""Tells an observer what a request's client gets, and when, without touching it."""

from collections import Counter
from collections.abc import AsyncGenerator, Callable

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.observer import Ending, FinishedRequest, RequestObserver
from services.runtime.errors import DeadlinePassed, GenerationFailed, ServiceError, SlowClient, Unavailable

Responses = AsyncGenerator[gateway_pb2.GenerateResponse, None]


async def measured(
    responses: Responses, observer: RequestObserver, arrival: float, clock: Callable[[], float]
) -> Responses:
    """Pass the responses of one request on. `arrival` and `clock` are in seconds.

    A request that was refused before an engine took it has no ending.
    """
    ending: Ending | None = Ending.ABORT  # what it is if the client leaves
    last_tokens_at: float | None = None
    started, lengths = gateway_pb2.Started(), Counter[int]()
    try:
        async for response in responses:
            if count := len(response.delta.token_ids):
                now = clock()
                lengths[response.delta.sample] += count
                _tell_tokens(observer, count, now - arrival, None if last_tokens_at is None else now - last_tokens_at)
                last_tokens_at = now
            elif response.HasField("started"):
                started = response.started
            elif response.HasField("finished"):
                ending = _ending(response.finished)
                observer.finished(_figures(started, response.finished, max(lengths.values(), default=0)))
            yield response
    except (DeadlinePassed, SlowClient):
        raise
    except (Unavailable, GenerationFailed):
        ending = Ending.ERROR
        raise
    except ServiceError:
        ending = None
        raise
    finally:
        observer.ended(ending, clock() - arrival)


def _tell_tokens(observer: RequestObserver, count: int, since_arrival: float, since_last: float | None) -> None:
    if since_last is not None:
        observer.next_tokens(count, since_last)
        return
    observer.first_token(since_arrival)
    if count > 1:
        observer.next_tokens(count - 1, 0.0)


def _figures(started: gateway_pb2.Started, finished: gateway_pb2.Finished, longest: int) -> FinishedRequest:
    usage, timing = finished.usage, finished.timing
    return FinishedRequest(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated_tokens=usage.generated_tokens,
        longest_sample=longest,
        samples=len(finished.samples),
        max_tokens=started.max_tokens,
        queued=timing.queued.ToTimedelta().total_seconds(),
        prefill=timing.prefill.ToTimedelta().total_seconds(),
        decode=timing.decode.ToTimedelta().total_seconds(),
    )


def _ending(finished: gateway_pb2.Finished) -> Ending:
    length = finished.samples[0].reason == decoding_pb2.FINISH_REASON_LENGTH
    return Ending.LENGTH if length else Ending.STOP
