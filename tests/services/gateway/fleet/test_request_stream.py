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


def a_stream(*events: Event, max_tokens: int = 10) -> RequestStream:
    stream = RequestStream(engine_pb2.Submission(request_id="r"), max_tokens)
    for event in events:
        stream.put(event)
    return stream


def read(stream: RequestStream, deadline: float | None = None) -> list[Event]:
    return asyncio.run(stream.next_events(deadline))


def test_unread_events_keep_their_order_and_tokens_of_a_sample_are_merged() -> None:
    end = engine_pb2.SampleTokens(request_id="r", sample=1, token_ids=[9], end=engine_pb2.SampleEnd(stop_token_id=9))
    stream = a_stream(STARTED, tokens(1, 5), tokens(0, 6), tokens(1, 7, 8), end, FINISHED)
    merged = engine_pb2.SampleTokens(
        request_id="r", sample=1, token_ids=[5, 7, 8, 9], end=engine_pb2.SampleEnd(stop_token_id=9)
    )
    assert read(stream) == [STARTED, merged, tokens(0, 6), FINISHED]


def test_log_probabilities_are_merged_with_their_tokens() -> None:
    stream = a_stream(tokens(0, 1, logprob=-1), tokens(0, 2, 3, logprob=-2))
    (merged,) = read(stream)
    assert isinstance(merged, engine_pb2.SampleTokens)
    assert [one.logprob for one in merged.logprobs] == [-1, -2, -2]


def test_read_events_are_not_merged_into() -> None:
    stream = a_stream(tokens(0, 1))
    first = read(stream)
    stream.put(tokens(0, 2))
    assert (first, read(stream)) == ([tokens(0, 1)], [tokens(0, 2)])


def test_an_overflow_drops_all_unread_events() -> None:
    stream = a_stream(tokens(0, *range(6)), tokens(1, *range(4)))
    assert not stream.overflowed
    stream.put(tokens(0, 1))
    assert stream.overflowed
    stream.put(FINISHED)
    assert stream._unread == []
    with pytest.raises(SlowClient, match="the client left more than 10 tokens unread"):
        read(stream)


def test_a_single_event_may_exceed_the_limit() -> None:
    assert read(a_stream(tokens(0, *range(50)))) == [tokens(0, *range(50))]


def test_reading_resets_the_count() -> None:
    stream = a_stream()
    for _ in range(5):
        stream.put(tokens(0, *range(9)))
        read(stream)
    assert not stream.overflowed


def test_scores_of_a_prompt_do_not_count() -> None:
    scores = engine_pb2.PromptScores(request_id="r", logprobs=[decoding_pb2.TokenLogprobs(logprob=-1)] * 50)
    assert read(a_stream(STARTED, scores, scores)) == [STARTED, scores, scores]


def test_events_before_a_disconnect_are_read_first() -> None:
    stream = a_stream(tokens(0, 1))
    stream.disconnect()
    assert read(stream) == [tokens(0, 1)]
    for _ in range(2):
        with pytest.raises(EngineDisconnected):
            read(stream)


def test_waiting_ends_at_the_deadline() -> None:
    async def late() -> None:
        stream = a_stream(STARTED)
        now = asyncio.get_running_loop().time()
        assert await stream.next_events(now) == [STARTED]
        with pytest.raises(TimeoutError):
            await stream.next_events(now)

    asyncio.run(late())


def test_unread_events_are_read_after_the_deadline() -> None:
    async def late() -> None:
        stream, now = a_stream(), asyncio.get_running_loop().time()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await stream.next_events(now)
        stream.put(STARTED)
        assert await stream.next_events(now) == [STARTED]
        with pytest.raises(TimeoutError):
            await stream.next_events(now)

    asyncio.run(late())


def test_events_do_not_extend_the_deadline() -> None:
    """All waits share one timer, which is the only one of the loop."""

    async def repeated() -> None:
        stream, loop = a_stream(), asyncio.get_running_loop()
        for _ in range(3):
            reader = asyncio.create_task(stream.next_events(loop.time() + 60))
            await asyncio.sleep(0)
            stream.put(STARTED)
            assert await reader == [STARTED]
        (timer,) = loop._scheduled  # type: ignore[attr-defined]
        stream.close()
        assert timer.cancelled()

    asyncio.run(repeated())


def test_a_cancelled_reader_loses_no_event() -> None:
    async def cancelled() -> list[Event]:
        stream = a_stream()
        reader = asyncio.create_task(stream.next_events(None))
        await asyncio.sleep(0)
        reader.cancel()
        stream.put(STARTED)
        with pytest.raises(asyncio.CancelledError):
            await reader
        return await stream.next_events(None)

    assert asyncio.run(cancelled()) == [STARTED]


def test_an_event_wakes_the_reader() -> None:
    async def both() -> list[Event]:
        stream = a_stream()
        reader = asyncio.create_task(stream.next_events(None))
        await asyncio.sleep(0)
        stream.put(STARTED)
        return await reader

    assert asyncio.run(both()) == [STARTED]


async def a_waiting_reader(stream: RequestStream) -> "asyncio.Task[list[Event]]":
    reader = asyncio.create_task(stream.next_events(None))
    await asyncio.sleep(0)
    return reader


def test_tokens_are_received_while_the_reader_waits_and_does_not_wake_up() -> None:
    async def received() -> None:
        stream, taken = a_stream(), list[Event]()
        stream.receiver = lambda tokens: not taken.append(tokens)
        reader = await a_waiting_reader(stream)
        for token in (1, 2):
            stream.put(tokens(0, token))
        await asyncio.sleep(0)
        assert not reader.done()
        stream.put(FINISHED)
        assert await reader == [FINISHED]
        assert taken == [tokens(0, 1), tokens(0, 2)]

    asyncio.run(received())


def test_no_token_is_received_while_others_are_unread() -> None:
    async def unread() -> None:
        stream, taken = a_stream(), list[Event]()
        stream.receiver = lambda tokens: not taken.append(tokens)
        stream.put(tokens(0, 1))
        assert await stream.next_events(None) == [tokens(0, 1)], "nobody waited"
        reader = await a_waiting_reader(stream)
        stream.put(STARTED)
        stream.put(tokens(0, 2))
        assert await reader == [STARTED, tokens(0, 2)]
        assert not taken

    asyncio.run(unread())


def test_tokens_that_are_not_received_are_read() -> None:
    async def declined() -> list[Event]:
        stream = a_stream()
        stream.receiver = lambda _: False
        reader = await a_waiting_reader(stream)
        stream.put(tokens(0, 1))
        stream.put(tokens(0, 2))
        return await reader

    assert asyncio.run(declined()) == [tokens(0, 1, 2)]


def test_an_error_of_the_receiver_is_the_readers() -> None:
    async def failing() -> None:
        stream = a_stream()
        stream.receiver = lambda tokens: 1 // (tokens.sample * 0) == 1
        reader = await a_waiting_reader(stream)
        stream.put(tokens(0, 1))
        with pytest.raises(ZeroDivisionError):
            await reader

    asyncio.run(failing())
