"""A ticket: what came back for a request waits here, merged and bounded, until it is read."""

import asyncio

import pytest

from quire.v1 import decoding_pb2, engine_pb2
from services.gateway.fleet.request_stream import EngineDisconnected, Event, RequestStream
from services.runtime.errors import SlowClient

STARTED = engine_pb2.RequestStarted(request_id="r", cached_tokens=3)
FINISHED = engine_pb2.RequestFinished(request_id="r")


def tokens(sample: int, *token_ids: int, logprob: float | None = None) -> engine_pb2.SampleTokens:
    logprobs = [] if logprob is None else [decoding_pb2.TokenLogprobs(logprob=logprob) for _ in token_ids]
    return engine_pb2.SampleTokens(request_id="r", sample=sample, token_ids=token_ids, logprobs=logprobs)


def a_ticket(*events: Event, max_tokens: int = 10) -> RequestStream:
    ticket = RequestStream(engine_pb2.Submission(request_id="r"), max_tokens)
    for event in events:
        ticket.put(event)
    return ticket


def read(ticket: RequestStream, deadline: float | None = None) -> list[Event]:
    return asyncio.run(ticket.next_events(deadline))


def test_what_waits_comes_in_order_and_the_tokens_of_a_sample_as_one() -> None:
    end = engine_pb2.SampleTokens(request_id="r", sample=1, token_ids=[9], end=engine_pb2.SampleEnd(stop_token_id=9))
    ticket = a_ticket(STARTED, tokens(1, 5), tokens(0, 6), tokens(1, 7, 8), end, FINISHED)
    merged = engine_pb2.SampleTokens(
        request_id="r", sample=1, token_ids=[5, 7, 8, 9], end=engine_pb2.SampleEnd(stop_token_id=9)
    )
    assert read(ticket) == [STARTED, merged, tokens(0, 6), FINISHED]


def test_log_probabilities_stay_beside_their_tokens() -> None:
    ticket = a_ticket(tokens(0, 1, logprob=-1), tokens(0, 2, 3, logprob=-2))
    (merged,) = read(ticket)
    assert isinstance(merged, engine_pb2.SampleTokens)
    assert [one.logprob for one in merged.logprobs] == [-1, -2, -2]


def test_what_was_read_is_not_added_to() -> None:
    ticket = a_ticket(tokens(0, 1))
    first = read(ticket)
    ticket.put(tokens(0, 2))
    assert (first, read(ticket)) == ([tokens(0, 1)], [tokens(0, 2)])


def test_more_tokens_than_may_wait_end_it_and_none_is_kept() -> None:
    ticket = a_ticket(tokens(0, *range(6)), tokens(1, *range(4)))
    assert not ticket.overflowed
    ticket.put(tokens(0, 1))
    assert ticket.overflowed
    ticket.put(FINISHED)
    assert ticket._unread == []
    with pytest.raises(SlowClient, match="the client left more than 10 tokens unread"):
        read(ticket)


def test_news_that_came_at_once_may_be_longer_than_what_may_wait() -> None:
    assert read(a_ticket(tokens(0, *range(50)))) == [tokens(0, *range(50))]


def test_each_reading_begins_a_new_count() -> None:
    ticket = a_ticket()
    for _ in range(5):
        ticket.put(tokens(0, *range(9)))
        read(ticket)
    assert not ticket.overflowed


def test_scores_of_a_prompt_do_not_count() -> None:
    scores = engine_pb2.PromptScores(request_id="r", logprobs=[decoding_pb2.TokenLogprobs(logprob=-1)] * 50)
    assert read(a_ticket(STARTED, scores, scores)) == [STARTED, scores, scores]


def test_what_came_before_the_link_broke_is_read_first() -> None:
    ticket = a_ticket(tokens(0, 1))
    ticket.disconnect()
    assert read(ticket) == [tokens(0, 1)]
    for _ in range(2):
        with pytest.raises(EngineDisconnected):
            read(ticket)


def test_nothing_is_waited_for_beyond_the_deadline() -> None:
    async def late() -> None:
        ticket = a_ticket(STARTED)
        now = asyncio.get_running_loop().time()
        assert await ticket.next_events(now) == [STARTED]
        with pytest.raises(TimeoutError):
            await ticket.next_events(now)

    asyncio.run(late())


def test_a_reader_that_waits_is_woken() -> None:
    async def both() -> list[Event]:
        ticket = a_ticket()
        reader = asyncio.create_task(ticket.next_events(None))
        await asyncio.sleep(0)
        ticket.put(STARTED)
        return await reader

    assert asyncio.run(both()) == [STARTED]
