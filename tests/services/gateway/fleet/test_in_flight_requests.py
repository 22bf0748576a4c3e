import asyncio
from collections.abc import AsyncIterator

import pytest

from quire.v1 import engine_pb2 as pb
from services.gateway.fleet.in_flight_requests import InFlightRequests
from services.gateway.fleet.request_stream import EngineDisconnected
from services.runtime.errors import RequestExists, SlowClient


def submission(attempt: int = 1) -> pb.Submission:
    return pb.Submission(request_id="r", attempt=attempt)


def tokens(*token_ids: int, attempt: int = 1) -> pb.SampleTokens:
    return pb.SampleTokens(request_id="r", attempt=attempt, token_ids=token_ids)


def finished(attempt: int = 1) -> pb.RequestFinished:
    return pb.RequestFinished(request_id="r", attempt=attempt)


def sent(requests: InFlightRequests, count: int) -> list[pb.ServeRequest]:
    async def read() -> list[pb.ServeRequest]:
        outgoing = requests.outgoing()
        async with asyncio.timeout(1):
            return [await anext(outgoing) for _ in range(count)]

    return asyncio.run(read())


def test_an_id_is_live_until_its_request_is_released() -> None:
    requests = InFlightRequests(10)
    stream = requests.submit(submission())
    with pytest.raises(RequestExists):
        requests.submit(submission())
    requests.release(stream, now=1.0)
    assert len(requests) == 0
    requests.submit(submission())
    assert len(requests) == 1


def test_a_new_attempt_ignores_events_of_the_released_one() -> None:
    requests = InFlightRequests(10)
    requests.release(requests.submit(submission()), now=1.0)
    again = requests.submit(submission())
    assert again.submission.attempt == 2
    requests.deliver(tokens(5), last=False)
    requests.deliver(tokens(6, attempt=2), last=False)
    assert asyncio.run(again.next_events(None)) == [tokens(6, attempt=2)]


def test_the_end_of_a_released_request_returns_its_release_time_once() -> None:
    requests = InFlightRequests(10)
    requests.release(requests.submit(submission()), now=7.0)
    assert requests.deliver(tokens(5), last=False) is None
    assert requests.deliver(finished(attempt=2), last=True) is None
    assert requests.deliver(finished(), last=True) == 7.0
    assert requests.deliver(finished(), last=True) is None


def test_an_ended_request_leaves_no_released_attempt() -> None:
    requests = InFlightRequests(10)
    stream = requests.submit(submission())
    assert requests.deliver(finished(), last=True) is None
    requests.release(stream, now=1.0)
    assert requests.submit(submission()).submission.attempt == 1


def test_an_overflowed_request_is_cancelled_once() -> None:
    requests = InFlightRequests(10)
    stream = requests.submit(submission())
    for _ in range(3):
        requests.deliver(tokens(*range(8)), last=False)
    with pytest.raises(SlowClient):
        asyncio.run(stream.next_events(None))
    requests.cancel(stream, pb.CANCEL_REASON_CLIENT)
    first, slow, left = sent(requests, 3)
    assert first.submission == stream.submission
    assert [slow.cancel.reason, left.cancel.reason] == [pb.CANCEL_REASON_SLOW_CLIENT, pb.CANCEL_REASON_CLIENT]


def test_a_disconnect_drops_streams_and_unsent_messages() -> None:
    requests = InFlightRequests(10)
    requests.release(requests.submit(submission()), now=1.0)
    stream = requests.submit(submission())
    requests.disconnect()
    with pytest.raises(EngineDisconnected):
        asyncio.run(stream.next_events(None))
    requests.cancel(stream, pb.CANCEL_REASON_CLIENT)
    later = requests.submit(submission())
    assert later.submission.attempt == 1, "the next engine has no earlier attempt"
    assert [one.submission for one in sent(requests, 1)] == [later.submission]
    assert requests._outgoing.empty()


def test_the_messages_of_a_link_end_when_it_breaks() -> None:
    """Otherwise gRPC's task would wait for the next one, and be reported as lost when it is collected."""

    async def messages() -> list[pb.ServeRequest]:
        requests = InFlightRequests(10)
        sending = asyncio.create_task(all_of(requests.outgoing()))
        await asyncio.sleep(0)
        requests.disconnect()
        return await asyncio.wait_for(sending, 10)

    async def all_of(outgoing: AsyncIterator[pb.ServeRequest]) -> list[pb.ServeRequest]:
        return [message async for message in outgoing]

    assert asyncio.run(messages()) == []
