"""The ledger over the wire: events for watchers, and explanations of requests."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice
from typing import Any

import grpc
import pytest

from blocks import Allocate, Free, FreeReason, Step
from kvmanager import KVManager, Ledger, PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from services.kvmanager.ledger_reader import LedgerReader
from services.kvmanager.observer import PoolObserver
from services.kvmanager.raw_request_interceptor import RawRequestInterceptor
from services.kvmanager.recorder import OperationsRecorder
from services.kvmanager.servicer import KVManagerServicer
from services.runtime import transport
from services.runtime.errors import FIELD_METADATA
from tests.contract.block_managers import LoopThread
from tests.running_quire import CALL_SECONDS
from tests.services.kvmanager.attach_stream import Stream, Stub, allocate, commits, extends, free

KEPT = 1000  # events
STEP = 500  # refusals


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


async def serve(address: str) -> grpc.aio.Server:
    server = transport.server(transport.STEP_MESSAGE_BYTES, [RawRequestInterceptor()], transport.LINK_MESSAGE_BYTES)
    manager = KVManager(epoch=1, ledger=Ledger(KEPT))
    servicer = KVManagerServicer(manager, PoolObserver(), time.perf_counter, 0, OperationsRecorder("", 1))
    kvmanager_pb2_grpc.add_KVManagerServicer_to_server(servicer, server)
    transport.bind(server, address)
    await server.start()
    return server


@pytest.fixture
def manager(loop: LoopThread) -> Iterator[Stub]:
    """A manager with an empty ledger of few events."""
    with tempfile.TemporaryDirectory(prefix="quire-") as folder:  # short enough for a socket's address
        server = loop.run(serve(address := f"unix:{folder}/manager.sock"))
        with grpc.insecure_channel(address, options=transport.channel_options()) as channel:
            yield Stub(channel)
        loop.run(server.stop(grace=0))


@pytest.fixture
def attached(manager: Stub) -> Iterator[Stream]:
    one = Stream(manager).attach(device_blocks=8)
    yield one
    one.break_off()


class Watcher:
    def __init__(self, stub: Stub, from_event: int = 0) -> None:
        self._call = stub.WatchEvents(pb.WatchEventsRequest(from_event=from_event), timeout=CALL_SECONDS)

    def read(self, count: int) -> list[pb.WatchEventsResponse]:
        return list(islice(self._call, count))

    def events(self, count: int) -> list[pb.Event]:
        messages = self.read(count)
        assert all(message.HasField("event") for message in messages)
        return [message.event for message in messages]

    def close(self) -> None:
        self._call.cancel()


@pytest.fixture
def watch(manager: Stub) -> Iterator[Callable[..., Watcher]]:
    watchers: list[Watcher] = []

    def begin(from_event: int = 0) -> Watcher:
        watchers.append(Watcher(manager, from_event))
        return watchers[-1]

    yield begin
    for one in watchers:
        one.close()


def refuse_many(engine: Stream, count: int) -> None:
    for _ in range(count // STEP):
        engine.apply(frees=[free(99)] * STEP)


# Watching


def test_a_watcher_receives_every_verb_with_its_blocks(attached: Stream, watch: Callable[..., Watcher]) -> None:
    waited = timedelta(seconds=1.5)
    attached.step(allocates=[allocate(1, [7] * 9, waited=waited)])
    attached.step(commits=commits((1, 0, [7] * 8)))
    attached.step(frees=[free(1)])
    attached.apply(extends=extends((5, [(6, 7)])), length_sequences=[9], length_tokens=[9])
    assert attached.half_close() == []
    common: dict[str, Any] = {"engine_id": "engine", "sequence": 1, "group": 1, "request_id": "request-1"}
    assert watch().events(6) == [
        pb.Event(event=1, engine_id="engine", pool=pb.POOL_CHANGE_ATTACHED),
        pb.Event(
            **common, event=2, step=1, item=pb.STEP_ITEM_ALLOCATE, range_firsts=[1], range_lasts=[3], waited=waited
        ),
        pb.Event(**common, event=3, step=2, item=pb.STEP_ITEM_COMMIT, range_firsts=[1], range_lasts=[2]),
        pb.Event(
            **common,
            event=4,
            step=3,
            item=pb.STEP_ITEM_FREE,
            range_firsts=[1],
            range_lasts=[3],
            free_reason=pb.FREE_REASON_FINISHED,
        ),
        pb.Event(
            event=5,
            engine_id="engine",
            step=4,
            item=pb.STEP_ITEM_EXTEND,
            sequence=6,
            group=5,
            refusal=pb.STEP_REFUSAL_UNKNOWN,
        ),
        pb.Event(event=6, engine_id="engine", pool=pb.POOL_CHANGE_DETACHED),
    ]


def test_a_watcher_from_a_number_receives_that_event_first(attached: Stream, watch: Callable[..., Watcher]) -> None:
    for sequence in (1, 2, 3):
        attached.allocate(sequence, 4)
    assert [(event.event, event.sequence) for event in watch(3).events(2)] == [(3, 2), (4, 3)]


def test_two_watchers_receive_the_same_events_live(attached: Stream, watch: Callable[..., Watcher]) -> None:
    early, late = watch(), watch(2)
    assert len(early.events(1)) == 1
    received = []
    for sequence in range(1, 6):
        attached.allocate(sequence, 4)
        received += early.events(1)
        assert received[-1].request_id == f"request-{sequence}"
    assert received == late.events(5)


def test_events_of_all_engines_are_in_one_ledger(
    manager: Stub, attached: Stream, watch: Callable[..., Watcher]
) -> None:
    other = Stream(manager).attach(engine_id="other")
    other.allocate(1, 4)
    attached.allocate(1, 4)
    assert [event.engine_id for event in watch().events(4)] == ["engine", "other", "other", "engine"]
    other.break_off()


def test_a_watcher_of_dropped_events_receives_the_gap(attached: Stream, watch: Callable[..., Watcher]) -> None:
    refuse_many(attached, 4 * STEP)
    gap, *rest = watch(1).read(150)
    assert gap == pb.WatchEventsResponse(skipped_to=4 * STEP + 2 - KEPT)
    assert [message.event.event for message in rest] == list(range(gap.skipped_to, gap.skipped_to + 149))
    # From the oldest kept event on there is no gap.
    assert watch(0).events(1)[0].event == gap.skipped_to


def test_a_slow_watcher_receives_the_gap_and_delays_no_engine(attached: Stream, watch: Callable[..., Watcher]) -> None:
    slow = watch()
    assert [event.event for event in slow.events(1)] == [1]
    refuse_many(attached, 40 * STEP)  # more than the connection buffers
    number, (message,) = 2, slow.read(1)
    while message.HasField("event"):
        assert message.event.event == number
        number, (message,) = number + 1, slow.read(1)
    assert number < message.skipped_to
    assert slow.events(1)[0].event == message.skipped_to


@pytest.mark.parametrize("from_event", [-1, 3])
def test_a_number_that_no_event_has_is_refused(
    attached: Stream, watch: Callable[..., Watcher], from_event: int
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        watch(from_event).read(1)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == f"from_event must be between 0 and 2, not {from_event}"
    assert dict(caught.value.trailing_metadata())[FIELD_METADATA] == "from_event"


@pytest.mark.parametrize("waited", [{"seconds": -1}, {"seconds": 10**12}, {"nanos": -5}])
def test_an_invalid_queue_time_is_refused(attached: Stream, waited: dict[str, int]) -> None:
    attached.send(step=pb.Step(step=1, allocates=[allocate(1, [7] * 4, waited=waited)]))
    code, message, field = attached.refusal()
    assert (code, field) == (grpc.StatusCode.INVALID_ARGUMENT, "step.allocates.waited")
    assert message.startswith("step.allocates.waited must be")


# Explaining


def explain(stub: Stub, sequence: int) -> tuple[list[pb.Event], str]:
    answer = stub.Explain(pb.ExplainRequest(request_id=f"request-{sequence}"))
    return list(answer.events), answer.summary


def test_a_request_that_was_refused_admitted_with_hits_preempted_and_finished_is_explained(
    manager: Stub, attached: Stream, watch: Callable[..., Watcher]
) -> None:
    attached.step(allocates=[allocate(1, [7] * 9)])
    attached.step(commits=commits((1, 0, [7] * 8)))
    second = allocate(2, [7] * 8 + [8] * 18, waited=timedelta(seconds=0.25))
    attached.step(allocates=[allocate(3, [3] * 9)])
    attached.apply(allocates=[second])
    attached.step(frees=[free(3)])
    attached.step(allocates=[second])
    attached.step(frees=[free(2, pb.FREE_REASON_PREEMPTED, 1)])
    attached.step(extends=extends((1, [(1, 16)])))
    attached.step(frees=[free(1)])
    attached.step(allocates=[second])
    attached.step(frees=[free(2)])
    events, summary = explain(manager, 2)
    assert [event.step for event in events] == [4, 6, 7, 10, 11]
    assert events == [event for event in watch().events(12) if event.request_id == "request-2"]
    assert summary == (
        "Its allocation was refused as out_of_blocks in step 4: 5 blocks are needed, 2 are available. "
        "It was scheduled by engine engine in step 6, 2 steps after it was first refused, queued for 0.25 seconds. "
        "8 of its 26 tokens were cached: logical block 2 was not cached, and no eviction is recorded. "
        "It was preempted in step 7 for request request-1. "
        "It was scheduled again by engine engine in step 10, queued for 0.25 seconds. "
        "8 of its 26 tokens were cached: logical block 2 was not cached, and no eviction is recorded. "
        "It finished in step 11. "
        "It held at most 7 blocks."
    )
    assert "Request request-2 was preempted for it in step 7 and released 7 blocks." in explain(manager, 1)[1]


def test_an_explanation_names_the_request_that_evicted_a_prefix(manager: Stub, attached: Stream) -> None:
    attached.step(allocates=[allocate(1, [7] * 9)])
    attached.step(commits=commits((1, 0, [7] * 8)))
    attached.step(frees=[free(1)])
    attached.step(allocates=[allocate(2, [8] * 28)])
    attached.step(frees=[free(2)])
    attached.step(allocates=[allocate(3, [7] * 9)])
    events, summary = explain(manager, 3)
    assert [event.cached_tokens for event in events] == [4]
    assert "logical block 1 was evicted in step 4 for the allocation of request request-2." in summary


def test_a_request_without_kept_events_is_not_found(manager: Stub) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        explain(manager, 1)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "'request-1'" in caught.value.details()


def test_an_explanation_of_a_full_ledger_pauses_for_other_tasks() -> None:
    manager = KVManager(epoch=1, ledger=Ledger(KEPT))
    session = manager.attach(PoolSpec("engine", 1, "m", 4, 20))
    manager.apply(session, Step(1, allocates=[Allocate(1, 1, "request-1", b"", [7] * 4, 4)]))
    for number in range(2, KEPT):
        manager.apply(session, Step(number, frees=[Free(99, FreeReason.FINISHED)]))

    async def pauses() -> int:
        explanation = asyncio.create_task(LedgerReader(manager.ledger).explain("request-1"))
        count = 0
        while not explanation.done():
            count += 1
            await asyncio.sleep(0)
        assert len(explanation.result().events) == 1
        return count

    assert asyncio.run(pauses()) >= 10
