"""The KV manager's calls over the wire: what an engine says on its stream, and what others may read."""

import itertools
import queue
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from services.errors import FIELD_METADATA
from tests.running_quire import CALL_SECONDS, RunningService

INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNSERVED = grpc.StatusCode.UNIMPLEMENTED
ABORTED = grpc.StatusCode.ABORTED


@pytest.fixture(scope="module")
def stub(service: Callable[..., RunningService]) -> kvmanager_pb2_grpc.KVManagerStub:
    return kvmanager_pb2_grpc.KVManagerStub(service("kvmanager", "--listen", "127.0.0.1:0").channel)


class Stream:
    """An engine's end of an Attach stream: messages go out one by one, and answers are read one by one."""

    def __init__(self, stub: kvmanager_pb2_grpc.KVManagerStub) -> None:
        self._outgoing: queue.SimpleQueue[pb.PoolRequest | None] = queue.SimpleQueue()
        self._call = stub.Attach(iter(self._outgoing.get, None), timeout=CALL_SECONDS)
        self._numbers = itertools.count(1)
        self.registered = pb.Registered()

    def send(self, **message: Any) -> None:
        self._outgoing.put(pb.PoolRequest(**message))

    def attach(self, **fields: Any) -> "Stream":
        self.send(register=register(**fields))
        self.send(report=pb.ReportPage(last=True))
        self.registered = next(self._call).registered
        return self

    def step(self, **items: Any) -> pb.StepResult:
        """Do a Step of the next number, and see that nothing of it is refused."""
        self.send(step=pb.Step(step=next(self._numbers), **items))
        result = next(self._call).result
        assert list(result.refusals) == []
        return result

    def allocate(self, sequence: int, tokens: int, **fields: Any) -> list[int]:
        item = pb.Allocate(
            group=sequence,
            sequence=sequence,
            request_id=f"request-{sequence}",
            token_ids=[sequence] * tokens,
            compute_tokens=tokens,
            **fields,
        )
        return list(self.step(allocates=[item]).tables[0].block_ids)

    def refusal(self) -> tuple[grpc.StatusCode, str, str]:
        """Wait for the end of the stream; return status, message and the field to blame."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self._call)
        metadata = dict(caught.value.trailing_metadata())
        return caught.value.code(), caught.value.details(), metadata.get(FIELD_METADATA, "")

    def half_close(self) -> list[pb.PoolResponse]:
        """Say that nothing more comes, and return what the manager still answers."""
        self._outgoing.put(None)
        return list(self._call)

    def break_off(self) -> None:
        """Lose the stream, as a broken connection does."""
        self._call.cancel()
        self._outgoing.put(None)


def register(**fields: Any) -> pb.Register:
    usual = {"engine_id": "engine", "incarnation": 5, "model_fingerprint": "m", "block_size": 4, "device_blocks": 20}
    return pb.Register(**(usual | fields))


@pytest.fixture
def stream(stub: kvmanager_pb2_grpc.KVManagerStub) -> Iterator[Callable[[], Stream]]:
    """Begins streams; all of them are closed at the end."""
    streams: list[Stream] = []

    def begin() -> Stream:
        streams.append(Stream(stub))
        return streams[-1]

    yield begin
    for one in streams:
        one.break_off()
    deadline = time.monotonic() + CALL_SECONDS
    while pools(stub) and time.monotonic() < deadline:
        pass  # each look is a call
    assert pools(stub) == [], "a broken stream leaves its pool"


@pytest.fixture
def engine(stream: Callable[[], Stream]) -> Stream:
    return stream().attach()


def pools(stub: kvmanager_pb2_grpc.KVManagerStub) -> list[pb.PoolInfo]:
    return list(stub.ListPools(pb.ListPoolsRequest()).pools)


# The beginning of a stream


def test_registration_names_the_managers_life_and_counts_sessions(stream: Callable[[], Stream]) -> None:
    first, second = (stream().attach(engine_id=name).registered for name in ("a", "b"))
    assert first.manager_epoch == second.manager_epoch != 0
    assert second.session > first.session > 0
    assert not first.HasField("lease")


BEGINNINGS = {
    "a step first": ([{"step": pb.Step(step=1)}], INVALID, "expected register, got step", ""),
    "a report first": ([{"report": pb.ReportPage(last=True)}], INVALID, "expected register, got report", ""),
    "an empty message first": ([{}], INVALID, "expected register, got an empty message", ""),
    "a step before the report has ended": (
        [{"register": register()}, {"report": pb.ReportPage()}, {"step": pb.Step(step=1)}],
        INVALID,
        "expected report, got step",
        "",
    ),
    "a second registration": ([{"register": register()}] * 2, INVALID, "expected report, got register", ""),
    "a report that is not empty": (
        [{"register": register()}, {"report": pb.ReportPage(keyed_blocks=[1], last=True)}],
        UNSERVED,
        "report: this version adopts empty reports only",
        "report",
    ),
    "an early page that is not empty": (
        [{"register": register()}, {"report": pb.ReportPage(sequences=[pb.SequenceReport(sequence=1)])}],
        UNSERVED,
        "report: this version adopts empty reports only",
        "report",
    ),
    "a host tier": (
        [{"register": register(host_blocks=3)}],
        UNSERVED,
        "host_blocks is 3, this version has no host tier",
        "host_blocks",
    ),
    "no blocks": ([{"register": register(device_blocks=0)}], INVALID, "device_blocks is 0, it must be at least 1", ""),
    "blocks of no tokens": ([{"register": register(block_size=0)}], INVALID, "block_size is 0, it must be at l", ""),
    "no incarnation": ([{"register": register(incarnation=0)}], INVALID, "incarnation is 0, it must be at least 1", ""),
    "no engine id": ([{"register": register(engine_id="")}], INVALID, "engine_id is empty", ""),
}


@pytest.mark.parametrize(("messages", "code", "reason", "field"), BEGINNINGS.values(), ids=BEGINNINGS.keys())
def test_a_stream_that_begins_wrongly_is_refused_and_leaves_no_pool(
    stub: kvmanager_pb2_grpc.KVManagerStub,
    stream: Callable[[], Stream],
    messages: list[dict[str, Any]],
    code: grpc.StatusCode,
    reason: str,
    field: str,
) -> None:
    engine = stream()
    for message in messages:
        engine.send(**message)
    refused = engine.refusal()
    assert (refused[0], refused[2]) == (code, field)
    assert refused[1].startswith(reason)
    assert pools(stub) == []


def test_a_stream_that_ends_before_it_is_registered_is_refused(stream: Callable[[], Stream]) -> None:
    engine = stream()
    engine.send(register=register())
    engine._outgoing.put(None)
    assert engine.refusal() == (INVALID, "expected report, but the stream ended", "")


def test_a_report_may_come_in_several_empty_pages(stream: Callable[[], Stream]) -> None:
    engine = stream()
    engine.send(register=register())
    for last in (False, False, True):
        engine.send(report=pb.ReportPage(last=last))
    assert next(engine._call).HasField("registered")


# Steps


STEPS = {
    "a report instead": ({"report": pb.ReportPage(last=True)}, INVALID, "expected step, got report", ""),
    "an empty message": ({}, INVALID, "expected step, got an empty message", ""),
    "a number seen before": ({"step": pb.Step(step=1)}, INVALID, "step 1 came after step 1", ""),
    "an extend of uneven arrays": (
        {"step": pb.Step(step=2, extends=[pb.Extend(group=1, sequences=[1], room_tokens=[5, 6])])},
        INVALID,
        "step.extends: its two arrays differ in length",
        "step.extends",
    ),
    "lengths of uneven arrays": (
        {"step": pb.Step(step=2, length_sequences=[1, 2], length_tokens=[3])},
        INVALID,
        "step.lengths: its two arrays differ in length",
        "step.lengths",
    ),
    "a free without a reason": (
        {"step": pb.Step(step=2, frees=[pb.Free(sequence=1)])},
        INVALID,
        "step.frees.reason is 0, which is not a reason",
        "step.frees.reason",
    ),
    "pins": (
        {"step": pb.Step(step=2, pins=[pb.PinChange(unpin="x")])},
        UNSERVED,
        "step.pins: this version does not serve it",
        "step.pins",
    ),
    "swap_outs": ({"step": pb.Step(step=2, swap_outs=[1])}, UNSERVED, "step.swap_outs: this version", "step.swap_outs"),
    "swap_ins": ({"step": pb.Step(step=2, swap_ins=[1])}, UNSERVED, "step.swap_ins: this version", "step.swap_ins"),
}


@pytest.mark.parametrize(("message", "code", "reason", "field"), STEPS.values(), ids=STEPS.keys())
def test_a_step_that_makes_no_sense_ends_the_stream_and_its_pool(
    stub: kvmanager_pb2_grpc.KVManagerStub,
    engine: Stream,
    message: dict[str, Any],
    code: grpc.StatusCode,
    reason: str,
    field: str,
) -> None:
    engine.allocate(1, 6)
    engine.send(**message)
    refused = engine.refusal()
    assert (refused[0], refused[2]) == (code, field)
    assert refused[1].startswith(reason)
    assert pools(stub) == []


def test_gaps_between_step_numbers_are_allowed(engine: Stream) -> None:
    engine.send(step=pb.Step(step=10))
    engine.send(step=pb.Step(step=1000))
    assert [next(engine._call).result.step for _ in range(2)] == [10, 1000]


def test_a_refused_item_is_named_and_the_others_are_done(engine: Stream) -> None:
    allocate = pb.Allocate(group=1, sequence=1, token_ids=[7] * 6, compute_tokens=6)
    unknown = pb.Free(sequence=99, reason=pb.FREE_REASON_FINISHED)
    engine.send(step=pb.Step(step=1, frees=[unknown], allocates=[allocate, allocate]))
    result = next(engine._call).result
    assert [(refusal.item, refusal.index, refusal.reason) for refusal in result.refusals] == [
        (pb.STEP_ITEM_FREE, 0, pb.STEP_REFUSAL_UNKNOWN),
        (pb.STEP_ITEM_ALLOCATE, 1, pb.STEP_REFUSAL_ALREADY_EXISTS),
    ]
    assert all(refusal.detail for refusal in result.refusals)
    assert [(table.sequence, len(table.block_ids)) for table in result.tables] == [(1, 2)]


def test_a_step_does_its_items_and_answers_with_tables_keys_copies_and_counts(engine: Stream) -> None:
    first, second = engine.allocate(1, 8)
    sealed = engine.step(commits=[pb.Commit(sequence=1, first_index=0, token_ids=[1] * 8)])
    assert list(sealed.sealed_blocks) == [first, second]
    assert len(sealed.sealed_keys) == 64
    forked = engine.step(forks=[pb.Fork(parent=1, child=2, length=7)])
    assert [(table.sequence, list(table.block_ids), table.room_tokens) for table in forked.tables] == [
        (1, [], 7),
        (2, [first, second], 7),
    ]
    written = engine.step(extends=[pb.Extend(group=1, sequences=[1, 2], room_tokens=[9, 9])])
    # The second block has a key, so each of them writes into a copy of it.
    tables = {table.sequence: list(table.block_ids) for table in written.tables}
    assert list(written.device_to_device.sources) == [second, second]
    assert list(written.device_to_device.destinations) == [tables[1][0], tables[2][0]]
    assert written.device == pb.BlockCounts(held=5, cached=1, free=14)
    counts = engine.step(frees=[pb.Free(sequence=id_, reason=pb.FREE_REASON_FINISHED) for id_ in (1, 2)]).device
    assert (counts.held, counts.free + counts.cached) == (0, 20)
    assert counts.cached == 2


# Sessions


def test_an_older_incarnation_is_refused_while_a_newer_one_is_attached(
    stub: kvmanager_pb2_grpc.KVManagerStub, stream: Callable[[], Stream]
) -> None:
    newer, older = stream().attach(incarnation=8), stream()
    older.send(register=register(incarnation=7))
    older.send(report=pb.ReportPage(last=True))
    code, message, _ = older.refusal()
    assert code == ABORTED
    assert "7" in message
    assert "8" in message
    newer.allocate(1, 3)
    assert [pool.incarnation for pool in pools(stub)] == [8]


@pytest.mark.parametrize("incarnation", [5, 6])
def test_a_newer_session_takes_the_engine_over_with_an_empty_pool(
    stub: kvmanager_pb2_grpc.KVManagerStub, engine: Stream, stream: Callable[[], Stream], incarnation: int
) -> None:
    engine.allocate(1, 3)
    newer = stream().attach(incarnation=incarnation)
    engine.send(step=pb.Step(step=2))
    code, message, _ = engine.refusal()
    assert (code, message.endswith("was replaced")) == (ABORTED, True)
    assert [(pool.session, pool.sequences) for pool in pools(stub)] == [(newer.registered.session, 0)]
    newer.allocate(1, 3)


def test_the_end_of_a_replaced_stream_leaves_the_new_pool_alone(
    stub: kvmanager_pb2_grpc.KVManagerStub, engine: Stream, stream: Callable[[], Stream]
) -> None:
    newer = stream().attach()
    assert engine.half_close() == []
    newer.allocate(1, 3)
    assert [pool.session for pool in pools(stub)] == [newer.registered.session]


def test_half_closing_the_stream_drops_the_pool(stub: kvmanager_pb2_grpc.KVManagerStub, engine: Stream) -> None:
    engine.allocate(1, 3)
    assert len(pools(stub)) == 1
    assert engine.half_close() == []
    assert pools(stub) == []


# What others read


@pytest.fixture
def two_pools(stream: Callable[[], Stream]) -> None:
    """Engine `big` has 7 sequences, of which 3 are freed with their blocks cached; engine `idle` has none."""
    big = stream().attach(engine_id="big", device_blocks=30, incarnation=11, model_fingerprint="tiny")
    stream().attach(engine_id="idle", device_blocks=5)
    for sequence in range(1, 8):
        big.allocate(sequence, 6)
    commits = [pb.Commit(sequence=sequence, first_index=0, token_ids=[sequence] * 4) for sequence in range(1, 8)]
    big.step(commits=commits, length_sequences=list(range(1, 8)), length_tokens=[5] * 7)
    big.step(frees=[pb.Free(sequence=sequence, reason=pb.FREE_REASON_FINISHED) for sequence in (2, 4, 6)])


@pytest.mark.usefixtures("two_pools")
def test_list_pools_and_get_pool_count_what_is_there(stub: kvmanager_pb2_grpc.KVManagerStub) -> None:
    big, idle = pools(stub)
    assert (big.engine_id, idle.engine_id) == ("big", "idle")
    assert stub.GetPool(pb.GetPoolRequest(engine_id="big")).pool == big
    assert (big.incarnation, big.model_fingerprint, big.block_size, big.device_blocks) == (11, "tiny", 4, 30)
    assert (big.sequences, big.groups, big.computed_tokens) == (4, 4, 20)
    assert big.device == pb.BlockCounts(free=19, cached=3, held=8)
    assert (big.totals.steps, big.totals.granted_blocks, big.totals.prefix_query_tokens) == (9, 14, 42)
    assert big.totals.peak_held_blocks == 14
    assert idle.device == pb.BlockCounts(free=5)


@pytest.mark.usefixtures("two_pools")
def test_the_block_map_comes_in_pages_and_adds_up_to_the_pool(stub: kvmanager_pb2_grpc.KVManagerStub) -> None:
    whole = stub.GetBlockMap(pb.GetBlockMapRequest(engine_id="big"))
    assert (whole.first_block, len(whole.states), len(whole.counts), whole.next_block) == (1, 30, 30, 0)
    states = list(whole.states)
    assert (states.count(pb.BLOCK_STATE_FREE), states.count(pb.BLOCK_STATE_CACHED)) == (19, 3)
    assert [count > 0 for count in whole.counts] == [state == pb.BLOCK_STATE_HELD for state in states]
    pages, first = [], 0
    while not pages or first:
        request = pb.GetBlockMapRequest(engine_id="big", tier=pb.TIER_DEVICE, first_block=first, block_count=7)
        pages.append(stub.GetBlockMap(request))
        first = pages[-1].next_block
    assert [page.first_block for page in pages] == [1, 8, 15, 22, 29]
    assert [state for page in pages for state in page.states] == states
    assert stub.GetBlockMap(pb.GetBlockMapRequest(engine_id="big", first_block=31)) == pb.GetBlockMapResponse(
        first_block=31
    )


@pytest.mark.usefixtures("two_pools")
def test_sequences_come_in_pages_in_order_of_their_id(stub: kvmanager_pb2_grpc.KVManagerStub) -> None:
    pages, token = [], ""
    while not pages or token:
        request = pb.ListSequencesRequest(engine_id="big", page_size=3, page_token=token)
        pages.append(stub.ListSequences(request))
        token = pages[-1].next_page_token
    sequences = [sequence for page in pages for sequence in page.sequences]
    assert [len(page.sequences) for page in pages] == [3, 1]
    assert [sequence.sequence for sequence in sequences] == [1, 3, 5, 7]
    assert sequences == list(stub.ListSequences(pb.ListSequencesRequest(engine_id="big")).sequences)
    blocks = list(sequences[1].block_ids)
    assert len(blocks) == 2
    assert sequences[1] == pb.SequenceInfo(
        sequence=3,
        group=3,
        request_id="request-3",
        block_ids=blocks,
        computed_tokens=5,
        room_tokens=8,
        committed_tokens=4,
    )


READS: dict[str, Callable[[kvmanager_pb2_grpc.KVManagerStub, str], Any]] = {
    "GetPool": lambda stub, id_: stub.GetPool(pb.GetPoolRequest(engine_id=id_)),
    "GetBlockMap": lambda stub, id_: stub.GetBlockMap(pb.GetBlockMapRequest(engine_id=id_)),
    "ListSequences": lambda stub, id_: stub.ListSequences(pb.ListSequencesRequest(engine_id=id_)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_an_empty_engine_id_means_the_only_pool_and_an_unknown_one_is_not_found(
    stub: kvmanager_pb2_grpc.KVManagerStub, stream: Callable[[], Stream], read: Callable[..., Any]
) -> None:
    for engine_id in ("", "nobody"):
        with pytest.raises(grpc.RpcError) as caught:
            read(stub, engine_id)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    stream().attach(engine_id="one")
    assert read(stub, "") == read(stub, "one")
    stream().attach(engine_id="two")
    with pytest.raises(grpc.RpcError) as caught:
        read(stub, "")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "one, two" in caught.value.details()


OUT_OF_RANGE = [
    ("GetBlockMap", pb.GetBlockMapRequest(tier=pb.TIER_HOST), UNSERVED, "tier"),
    ("GetBlockMap", pb.GetBlockMapRequest(block_count=-1), INVALID, "block_count"),
    ("GetBlockMap", pb.GetBlockMapRequest(first_block=-1), INVALID, "first_block"),
    ("ListSequences", pb.ListSequencesRequest(page_size=-1), INVALID, "page_size"),
    ("ListSequences", pb.ListSequencesRequest(page_token="next"), INVALID, "page_token"),
    ("ListSequences", pb.ListSequencesRequest(page_token="9" * 5000), INVALID, "page_token"),
]


@pytest.mark.parametrize(("method", "request_", "code", "field"), OUT_OF_RANGE)
@pytest.mark.usefixtures("engine")
def test_a_read_out_of_range_is_refused_naming_its_field(
    stub: kvmanager_pb2_grpc.KVManagerStub, method: str, request_: Any, code: grpc.StatusCode, field: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(request_)
    assert (caught.value.code(), dict(caught.value.trailing_metadata())[FIELD_METADATA]) == (code, field)
    assert caught.value.details().startswith(field)


UNSERVED_CALLS = {
    "LookupPrefix": pb.LookupPrefixRequest(),
    "Explain": pb.ExplainRequest(),
    "Audit": pb.AuditRequest(),
    "WatchEvents": pb.WatchEventsRequest(),
}


@pytest.mark.parametrize("method", UNSERVED_CALLS)
def test_a_call_that_is_not_served_yet_says_so(stub: kvmanager_pb2_grpc.KVManagerStub, method: str) -> None:
    call = getattr(stub, method)
    with pytest.raises(grpc.RpcError) as caught:
        list(call(UNSERVED_CALLS[method]))
    assert caught.value.code() == UNSERVED
