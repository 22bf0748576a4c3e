"""KV events for smg, from a stream that the test feeds."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2

from engine.schedule.stats import SchedulerTotals
from quire.v1 import engine_pb2
from services.engine.observer import EngineStats
from services.engine.smg import subscriptions
from services.engine.smg.loads import Loads
from services.engine.smg.subscriptions import MOST_SUBSCRIBERS, Subscriptions
from services.runtime.errors import Overloaded, SlowClient
from tests.services.engine.smg.announcer import Announcer, SmgIndex

ENGINE = engine_pb2.GetEngineResponse(device_blocks=100, block_size=4, max_sequences=7)


class Fed:
    """Subscriptions to a stream, and the stats of an engine that a test sets."""

    def __init__(self, announcer: Announcer, most_batches: int = 4, heartbeat_seconds: float = 1000) -> None:
        self.stats = EngineStats(0, 0, SchedulerTotals(), available_blocks=100)
        self.announcer = announcer
        self.subscriptions = Subscriptions(
            announcer.stream, Loads(lambda: self.stats, ENGINE), most_batches, heartbeat_seconds
        )

    def open(self, start: int = 0, *, early: bool = False) -> AsyncIterator[common_pb2.KvEventBatch]:
        request = common_pb2.SubscribeKvEventsRequest(
            start_sequence_number=start, load_records_before_first_batch=early
        )
        return self.subscriptions.messages(request)


async def read(messages: AsyncIterator[common_pb2.KvEventBatch], index: SmgIndex, through: int) -> None:
    """Apply messages up to a sequence number."""
    while index.sequence < through:
        index.apply(await anext(messages))


def run(coroutine: Any) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 60))


@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=12))
def test_a_subscriber_has_the_engines_blocks_however_late_and_slow_it_is(
    seed: int, turns: list[tuple[int, int]]
) -> None:
    """Each turn changes the pool so many times, and then reads so many messages."""

    async def follow() -> None:
        announcer, index = Announcer(seed), SmgIndex()
        fed = Fed(announcer)
        messages = fed.open()
        for changes, reads in turns:
            for _ in range(changes):
                announcer.change()
            for _ in range(reads):
                if index.sequence != announcer.stream.next_sequence - 1:
                    index.apply(await anext(messages))
                await asyncio.sleep(0)
        announcer.stream.publish([])
        await read(messages, index, announcer.stream.next_sequence - 1)
        assert index.blocks == announcer.wire_state()

    run(follow())


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_a_snapshot_is_exact_although_the_pool_changes_while_it_is_made(seed: int, changes: int) -> None:
    async def follow() -> None:
        announcer, index = Announcer(seed, history=1000), SmgIndex()
        for _ in range(40):
            announcer.change()

        async def change() -> None:
            for _ in range(changes):
                announcer.change()
                await asyncio.sleep(0)

        changing = asyncio.create_task(change())
        messages = Fed(announcer, most_batches=1000).open()
        index.apply(await anext(messages))
        await changing
        announcer.stream.publish([])
        await read(messages, index, announcer.stream.next_sequence - 1)
        assert index.snapshots == 1
        assert index.blocks == announcer.wire_state()

    run(follow())


@given(st.integers(0, 2**32), st.integers(0, 20))
def test_a_subscriber_that_comes_back_continues_from_the_history_or_gets_a_snapshot(seed: int, missed: int) -> None:
    async def follow() -> None:
        announcer, index = Announcer(seed, history=8), SmgIndex()
        fed = Fed(announcer, most_batches=100)
        for _ in range(10):
            announcer.change()
        await read(fed.open(), index, announcer.stream.next_sequence - 1)
        for _ in range(missed):
            announcer.change()
        announcer.stream.publish([])
        again = fed.open(index.sequence + 1)
        await read(again, index, announcer.stream.next_sequence - 1)
        assert index.snapshots == (1 if missed + 1 <= 8 else 2)
        assert index.blocks == announcer.wire_state()

    run(follow())


@pytest.mark.parametrize("start", [1, 999, 10**15])
def test_a_position_of_another_process_is_answered_with_a_snapshot(start: int) -> None:
    async def follow() -> None:
        announcer = Announcer(1)
        for _ in range(5):
            announcer.change()
        first = await anext(Fed(announcer).open(start))
        assert (first.snapshot.index, first.sequence_number) == (0, announcer.stream.next_sequence - 1)

    run(follow())


def test_a_stream_without_blocks_begins_with_cleared_alone() -> None:
    async def follow() -> None:
        first = await anext(Fed(Announcer(1)).open())
        assert [event.WhichOneof("data") for event in first.events] == ["cleared"]
        assert (first.snapshot.count, first.snapshot.blocks, first.sequence_number) == (1, 0, 999)

    run(follow())


def test_chunks_have_consecutive_numbers_and_the_last_one_that_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    async def follow() -> None:
        monkeypatch.setattr("services.engine.smg.block_set.MOST_BLOCKS", 2)
        announcer = Announcer(5)
        while len(announcer.wire_state()) < 9:
            announcer.change()
        messages = Fed(announcer).open()
        chunks = [await anext(messages)]
        chunks += [await anext(messages) for _ in range(chunks[0].snapshot.count - 1)]
        last = announcer.stream.next_sequence - 1
        assert len(chunks) > 2
        assert [one.sequence_number for one in chunks] == [*range(last - len(chunks) + 1, last + 1)]
        assert [one.snapshot.index for one in chunks] == [*range(len(chunks))]
        assert {one.snapshot.blocks for one in chunks} == {len(announcer.wire_state())}

    run(follow())


def test_a_subscriber_behind_its_queue_and_the_history_gets_a_snapshot_and_is_counted() -> None:
    async def follow() -> None:
        announcer, index = Announcer(3, history=2), SmgIndex()
        fed = Fed(announcer, most_batches=2)
        messages = fed.open()
        await read(messages, index, 999)
        announcer.stream.publish([])
        await read(messages, index, announcer.stream.next_sequence - 1)
        for _ in range(9):
            announcer.change()
        await read(messages, index, announcer.stream.next_sequence - 1)
        assert index.blocks == announcer.wire_state()
        assert index.snapshots == 2
        await messages.aclose()  # type: ignore[attr-defined]
        stats = fed.subscriptions.stats
        assert (stats.subscribers, stats.snapshots, stats.catch_ups) == (0, 2, 1)
        assert stats.batches >= 1

    run(follow())


def test_a_subscriber_that_never_catches_up_is_disconnected() -> None:
    async def read_slowly(announcer: Announcer) -> None:
        async for _ in Fed(announcer, most_batches=1).open():
            for _ in range(3):
                announcer.stream.publish([])

    async def follow() -> None:
        with pytest.raises(SlowClient):
            await read_slowly(Announcer(3, history=1))

    run(follow())


def test_there_is_a_bound_of_subscribers() -> None:
    async def follow() -> None:
        fed = Fed(Announcer(1))
        streams = [fed.open() for _ in range(MOST_SUBSCRIBERS)]
        for one in streams:
            await anext(one)
        with pytest.raises(Overloaded):
            await anext(fed.open())
        await streams[0].aclose()  # type: ignore[attr-defined]
        await anext(fed.open())

    run(follow())


def test_each_message_has_the_load_and_changes_of_it_are_sent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "_RECORD_SECONDS", 0.01)

    async def follow() -> None:
        fed = Fed(Announcer(1))
        messages = fed.open()
        first = (await anext(messages)).load
        assert (first.running_requests, first.token_usage, first.max_running_requests, first.load_only) == (0, 0, 7, 0)
        fed.stats = fed.stats._replace(running=2, waiting=1, available_blocks=75, uncomputed_tokens=11)
        message = await anext(messages)
        load = message.load
        assert load.load_only
        assert message.sequence_number == 999
        assert (load.running_requests, load.waiting_requests, load.waiting_uncached_tokens) == (2, 1, 11)
        assert (load.token_usage, load.active_token_usage, load.num_used_tokens) == (0.25, 0.25, 100)
        assert load.sample > first.sample
        assert load.HasField("engine_silence_ms")

    run(follow())


def test_an_unchanged_load_is_sent_as_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "_RECORD_SECONDS", 0.01)

    async def follow() -> None:
        messages = Fed(Announcer(1), heartbeat_seconds=0.02).open()
        await anext(messages)
        beats = [await anext(messages) for _ in range(3)]
        assert all(one.load.load_only and not one.events for one in beats)
        assert not any(one.load.HasField("engine_silence_ms") for one in beats)

    run(follow())


@pytest.mark.parametrize("early", [False, True])
def test_a_load_precedes_the_first_batch_only_for_those_who_expect_it(early: bool) -> None:
    async def follow() -> None:
        first = await anext(Fed(Announcer(1)).open(early=early))
        assert first.load.load_only is early
        assert (first.sequence_number == 0) is early

    run(follow())


def test_events_of_a_stream_are_numbered_from_1() -> None:
    async def follow() -> None:
        announcer = Announcer(4, history=100)
        messages = Fed(announcer, most_batches=100).open()
        await anext(messages)
        while len(announcer.held) < 3:
            announcer.change()
        numbers: list[int] = []
        while len(numbers) < 3:
            numbers += [event.event_id for event in (await anext(messages)).events]
        assert numbers[:3] == [1, 2, 3]

    run(follow())
