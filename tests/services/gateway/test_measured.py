"""What an observer is told of a request, for every way in which it can go."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress

import pytest

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.measured import measured
from services.gateway.observer import Ending, FinishedRequest, RequestObserver
from services.runtime.errors import (
    DeadlinePassed,
    GenerationFailed,
    Overloaded,
    ServiceError,
    SlowClient,
    Unavailable,
)

ARRIVAL = 100.0
Response = gateway_pb2.GenerateResponse


class Heard(RequestObserver):
    """Keeps everything it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def first_token(self, seconds: float) -> None:
        self.events.append(("first", seconds))

    def next_tokens(self, count: int, seconds: float) -> None:
        self.events.append(("next", count, seconds))

    def finished(self, request: FinishedRequest) -> None:
        self.events.append(("finished", request))

    def ended(self, ending: Ending | None, seconds: float) -> None:
        self.events.append((ending, seconds))


def delta(*token_ids: int) -> Response:
    return Response(delta=gateway_pb2.Delta(text="x", token_ids=token_ids))


def finished(reason: decoding_pb2.FinishReason.ValueType) -> Response:
    return Response(finished=gateway_pb2.Finished(samples=[gateway_pb2.SampleFinish(reason=reason)]))


def hear(*steps: "Response | ServiceError", leave_after: int | None = None) -> tuple[list[Response], Heard]:
    """Let a response, or an error, come each second; return what the client got and what the observer heard."""
    heard, got = Heard(), []
    now = ARRIVAL

    async def responses() -> AsyncGenerator[Response, None]:
        nonlocal now
        for step in steps:
            now += 1
            if isinstance(step, ServiceError):
                raise step
            yield step

    async def client() -> None:
        async with aclosing(measured(responses(), heard, ARRIVAL, lambda: now)) as observed:
            async for response in observed:
                got.append(response)
                if len(got) == leave_after:
                    return

    with suppress(ServiceError):
        asyncio.run(client())
    return got, heard


def test_tokens_and_the_end_are_told_with_their_times_and_nothing_is_changed() -> None:
    steps = (Response(started=gateway_pb2.Started()), delta(1), delta(2), finished(decoding_pb2.FINISH_REASON_LENGTH))
    got, heard = hear(*steps)
    assert got == list(steps)
    assert [event for event in heard.events if event[0] != "finished"] == [
        ("first", 2.0),
        ("next", 1, 1.0),
        (Ending.LENGTH, 4.0),
    ]


def test_tokens_that_come_together_share_the_time_and_text_without_a_token_is_no_token() -> None:
    _, heard = hear(delta(1, 2, 3), delta(), delta(4, 5), finished(decoding_pb2.FINISH_REASON_STOP))
    *tokens, (_, request), end = heard.events
    assert tokens == [("first", 1.0), ("next", 2, 0.0), ("next", 2, 2.0)]
    assert isinstance(request, FinishedRequest)
    assert request.longest_sample == 5
    assert end == (Ending.STOP, 4.0)


def test_a_finished_request_is_told_with_its_figures_and_the_tokens_of_its_longest_sample() -> None:
    end = finished(decoding_pb2.FINISH_REASON_LENGTH)
    end.finished.samples.add(reason=decoding_pb2.FINISH_REASON_STOP)
    end.finished.usage.CopyFrom(gateway_pb2.Usage(prompt_tokens=7, cached_tokens=4, generated_tokens=5))
    end.finished.timing.queued.FromMilliseconds(250)
    end.finished.timing.prefill.FromMilliseconds(500)
    end.finished.timing.decode.FromMilliseconds(1500)
    parts = [(0, [1, 2]), (1, [3]), (0, [4, 5])]
    deltas = [Response(delta=gateway_pb2.Delta(sample=sample, token_ids=ids)) for sample, ids in parts]
    _, heard = hear(Response(started=gateway_pb2.Started(max_tokens=9)), *deltas, end)
    assert ("finished", FinishedRequest(7, 4, 5, 4, 2, 9, 0.25, 0.5, 1.5)) in heard.events


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (DeadlinePassed("late"), Ending.ABORT),
        (SlowClient("asleep"), Ending.ABORT),
        (Unavailable("gone"), Ending.ERROR),
        (GenerationFailed("broken"), Ending.ERROR),
        (Overloaded("full"), None),
    ],
)
def test_an_error_is_an_ending_and_a_refusal_is_told_as_none(error: ServiceError, ending: Ending | None) -> None:
    _, heard = hear(delta(1), error)
    assert heard.events == [("first", 1.0), (ending, 2.0)]


def test_a_client_that_leaves_aborts() -> None:
    got, heard = hear(delta(1), delta(2), delta(3), leave_after=2)
    assert len(got) == 2
    assert heard.events[-1] == (Ending.ABORT, 2.0)
