"""The KV manager's calls over the wire: Attach streams and reads."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from blocks import Allocate, Commit, Free, FreeReason, Pin, Reset, Step
from kvmanager import Pool, PoolSpec, report_of
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import FIELD_METADATA
from services.wire.report import pages_of
from tests.running_quire import RunningService
from tests.services.kvmanager.attach_stream import (
    Stream,
    Stub,
    allocate,
    commits,
    extends,
    free,
    pools,
    register,
    tables_of,
)

INVALID = grpc.StatusCode.INVALID_ARGUMENT
ABORTED = grpc.StatusCode.ABORTED


# Handshake


def test_registration_returns_the_managers_epoch_and_a_session_number(stream: Callable[[], Stream]) -> None:
    first, second = (stream().attach(engine_id=name).registered for name in ("a", "b"))
    assert first.manager_epoch == second.manager_epoch != 0
    assert second.session > first.session > 0
    assert first.HasField("lease")
    assert first.lease.ToSeconds() == 0


HANDSHAKES = {
    "a step first": ([{"step": pb.Step(step=1)}], "expected register, got step"),
    "a report first": ([{"report": pb.ReportPage(last=True)}], "expected register, got report"),
    "an empty message first": ([{}], "expected register, got an empty message"),
    "a step before the report has ended": (
        [{"register": register()}, {"report": pb.ReportPage()}, {"step": pb.Step(step=1)}],
        "expected report, got step",
    ),
    "a second registration": ([{"register": register()}] * 2, "expected report, got register"),
    "missing keys": (
        [{"register": register()}, {"report": pb.ReportPage(keyed_blocks=[1], last=True)}],
        "keys must have 32 bytes per block, not 0 for 1 blocks",
    ),
    "a report of more blocks than the pool has": (
        [{"register": register()}, {"report": pb.ReportPage(release_order=range(1, 22))}],
        "the report lists 21 device blocks, but the pool has 20",
    ),
    "a report that contradicts itself": (
        [{"register": register()}, {"report": pb.ReportPage(release_order=[*range(1, 20), 1], last=True)}],
        "device block 1 is listed in two states",
    ),
    "a report without some blocks": (
        [{"register": register()}, {"report": pb.ReportPage(release_order=[1])}, {"report": pb.ReportPage(last=True)}],
        "device: 19 blocks missing from tables and release order",
    ),
    "too many blocks": (
        [{"register": register(device_blocks=2**31 - 1)}],
        "device_blocks must be at most 16777216, not 2147483647",
    ),
    "blocks of too many tokens": (
        [{"register": register(block_size=65537)}],
        "block_size must be at most 65536, not 65537",
    ),
    "a name too long for a message": (
        [{"register": register(engine_id="x" * 201)}],
        "engine_id must have at most 200 characters, not 201",
    ),
    "no blocks": ([{"register": register(device_blocks=0)}], "device_blocks must be at least 1, not 0"),
    "blocks of no tokens": ([{"register": register(block_size=0)}], "block_size must be at least 1, not 0"),
    "no incarnation": ([{"register": register(incarnation=0)}], "incarnation must be at least 1, not 0"),
    "no engine id": ([{"register": register(engine_id="")}], "engine_id must not be empty"),
}


@pytest.mark.parametrize(("messages", "reason"), HANDSHAKES.values(), ids=HANDSHAKES.keys())
def test_an_invalid_handshake_is_refused_and_leaves_no_pool(
    stub: Stub, stream: Callable[[], Stream], messages: list[dict[str, Any]], reason: str
) -> None:
    engine = stream()
    for message in messages:
        engine.send(**message)
    code, details, field = engine.refusal()
    of_the_registration = len(messages) == 1 and "register" in messages[0]
    assert (code, field) == (INVALID, f"register.{reason.split()[0]}" if of_the_registration else "")
    assert details.startswith(reason)
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
    "a report after the handshake": ({"report": pb.ReportPage(last=True)}, "expected step, got report", ""),
    "an empty message": ({}, "expected step, got an empty message", ""),
    "a repeated step number": ({"step": pb.Step(step=1)}, "step must be higher than 1, not 1", ""),
    "an extend of uneven arrays": (
        {"step": pb.Step(step=2, extends=pb.Extends(groups=[1], sequences=[1], room_tokens=[5, 6]))},
        "step.extends: the arrays differ in length",
        "step.extends",
    ),
    "an extend of missing sequences": (
        {"step": pb.Step(step=2, extends=pb.Extends(groups=[1], sequence_counts=[2], sequences=[1], room_tokens=[5]))},
        "step.extends: the counts add up to 2, but there are 1 entries",
        "step.extends",
    ),
    "an extend without a group": (
        {"step": pb.Step(step=2, extends=pb.Extends(sequences=[1], room_tokens=[5]))},
        "step.extends: the arrays differ in length",
        "step.extends",
    ),
    "a negative token count": (
        {
            "step": pb.Step(
                step=2,
                commits=pb.Commits(sequences=[1, 2], first_indices=[0, 0], token_counts=[2, -1], token_ids=[7]),
            )
        },
        "step.commits: counts must not be negative",
        "step.commits",
    ),
    "commits without first indices": (
        {"step": pb.Step(step=2, commits=pb.Commits(sequences=[1], token_counts=[1], token_ids=[7]))},
        "step.commits: the arrays differ in length",
        "step.commits",
    ),
    "lengths of uneven arrays": (
        {"step": pb.Step(step=2, length_sequences=[1, 2], length_tokens=[3])},
        "step.lengths: the arrays differ in length",
        "step.lengths",
    ),
    "a free without a reason": (
        {"step": pb.Step(step=2, frees=[pb.Free(sequence=1)])},
        "step.frees.reason is 0, which is not a FreeReason",
        "step.frees.reason",
    ),
    "an empty pin": ({"step": pb.Step(step=2, pins=[pb.PinChange()])}, "step.pins has an empty entry", "step.pins"),
}


@pytest.mark.parametrize(("message", "reason", "field"), STEPS.values(), ids=STEPS.keys())
def test_an_invalid_step_ends_the_stream_and_its_pool(
    stub: Stub, engine: Stream, message: dict[str, Any], reason: str, field: str
) -> None:
    engine.allocate(1, 6)
    engine.send(**message)
    refused = engine.refusal()
    assert (refused[0], refused[2]) == (INVALID, field)
    assert refused[1].startswith(reason)
    assert pools(stub) == []


def test_the_result_of_a_step_has_tables_keys_copies_and_counts(engine: Stream) -> None:
    first, second = engine.allocate(1, 8)
    sealed = engine.step(commits=commits((1, 0, [1] * 8)))
    assert list(sealed.sealed_blocks) == [first, second]
    assert len(sealed.sealed_keys) == 64
    forked = engine.step(forks=[pb.Fork(parent=1, child=2, length=7)])
    assert [(table.sequence, list(table.block_ids), table.room_tokens) for table in tables_of(forked)] == [
        (1, [], 7),
        (2, [first, second], 7),
    ]
    written = engine.step(extends=extends((1, [(1, 9), (2, 9)])))
    # The second block has a key, so each of them writes into a copy of it.
    tables = {table.sequence: list(table.block_ids) for table in tables_of(written)}
    assert list(written.device_to_device.sources) == [second, second]
    assert list(written.device_to_device.destinations) == [tables[1][0], tables[2][0]]
    assert written.device == pb.BlockCounts(held=5, cached=1, free=14)
    counts = engine.step(frees=[free(id_) for id_ in (1, 2)]).device
    assert (counts.held, counts.free + counts.cached) == (0, 20)
    assert counts.cached == 2


# Sessions


@pytest.mark.parametrize("incarnation", [5, 6])
def test_a_newer_session_replaces_the_older_with_an_empty_pool(
    stub: Stub, engine: Stream, stream: Callable[[], Stream], incarnation: int
) -> None:
    engine.allocate(1, 3)
    newer = stream().attach(incarnation=incarnation)
    code, message, _ = engine.refusal()
    assert (code, message.endswith("was replaced")) == (ABORTED, True)
    assert [(pool.session, pool.sequences) for pool in pools(stub)] == [(newer.registered.session, 0)]
    newer.allocate(1, 3)


def test_the_end_of_a_replaced_stream_does_not_drop_the_new_pool(
    stub: Stub, engine: Stream, stream: Callable[[], Stream]
) -> None:
    newer = stream().attach()
    assert engine.refusal()[0] is ABORTED
    engine.break_off()
    newer.allocate(1, 3)
    assert [pool.session for pool in pools(stub)] == [newer.registered.session]


def test_half_closing_the_stream_drops_the_pool(stub: Stub, engine: Stream) -> None:
    engine.allocate(1, 3)
    assert len(pools(stub)) == 1
    assert engine.half_close() == []
    assert pools(stub) == []


# Reads


@pytest.fixture
def two_pools(stream: Callable[[], Stream]) -> None:
    """Engine `big` has 7 sequences, of which 3 are freed with their blocks cached; engine `idle` has none."""
    big = stream().attach(engine_id="big", device_blocks=30, incarnation=11, model_fingerprint="tiny")
    stream().attach(engine_id="idle", device_blocks=5)
    for sequence in range(1, 8):
        big.allocate(sequence, 6)
    sealed = commits(*((sequence, 0, [sequence] * 4) for sequence in range(1, 8)))
    big.step(commits=sealed, length_sequences=list(range(1, 8)), length_tokens=[5] * 7)
    big.step(frees=[free(sequence) for sequence in (2, 4, 6)])


@pytest.mark.usefixtures("two_pools")
def test_list_pools_and_get_pool_return_the_counts(stub: Stub) -> None:
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
def test_the_block_map_comes_in_pages_and_adds_up_to_the_pool(stub: Stub) -> None:
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
def test_sequences_come_in_pages_in_order_of_their_id(stub: Stub) -> None:
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


def blocks_of(stub: Stub, request_id: str, **fields: Any) -> pb.GetRequestBlocksResponse:
    return stub.GetRequestBlocks(pb.GetRequestBlocksRequest(request_id=request_id, **fields))


def test_the_blocks_of_a_request_are_those_of_its_sequences_alone(stub: Stub, engine: Stream) -> None:
    engine.allocate(9, 4)
    table = engine.allocate(1, 9)
    engine.step(
        commits=commits((1, 0, [1] * 8)),
        length_sequences=[1],
        length_tokens=[9],
        forks=[pb.Fork(parent=1, child=2, length=9)],
    )
    found = blocks_of(stub, "request-1")
    assert (found.engine_id, found.group, found.block_size, found.device_blocks) == ("engine", 1, 4, 20)
    assert (found.sequence_count, [one.sequence for one in found.sequences]) == (2, [1, 2])
    assert found.sequences[0] == pb.SequenceBlocks(
        sequence=1,
        computed_tokens=9,
        room_tokens=9,
        prompt_tokens=9,
        committed_blocks=2,
        block_count=3,
        block_ids=table,
        counts=[2, 2, 2],
    )
    assert blocks_of(stub, "request-1", engine_id="engine", group=1) == found
    # Where it was is only a hint.
    assert blocks_of(stub, "request-1", engine_id="another", group=9) == found
    assert blocks_of(stub, "request-1", engine_id="engine", group=9) == found
    engine.step(frees=[free(1), free(2)])
    for known in ({}, {"engine_id": "engine", "group": 1}, {"engine_id": "engine", "group": 9}):
        with pytest.raises(grpc.RpcError) as caught:
            blocks_of(stub, "request-1", **known)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "request 'request-1' holds no blocks"


def test_the_blocks_of_a_request_are_its_latest_and_bounded(stub: Stub, stream: Callable[[], Stream]) -> None:
    engine = stream().attach(device_blocks=2000)
    table = engine.allocate(1, 4 * 600)
    engine.step(forks=[pb.Fork(parent=1, child=child, length=2400) for child in range(2, 21)])
    for asked, shown in ((0, 512), (9999, 512), (3, 3)):
        found = blocks_of(stub, "request-1", entry_count=asked)
        (first, *others) = found.sequences
        assert (found.sequence_count, 1 + len(others)) == (20, 16)
        assert (first.block_count, first.first_index) == (600, 600 - shown)
        assert list(first.block_ids) == table[-shown:]
        assert list(first.counts) == [20] * shown


READS: dict[str, Callable[[Stub, str], Any]] = {
    "GetPool": lambda stub, id_: stub.GetPool(pb.GetPoolRequest(engine_id=id_)),
    "GetBlockMap": lambda stub, id_: stub.GetBlockMap(pb.GetBlockMapRequest(engine_id=id_)),
    "ListSequences": lambda stub, id_: stub.ListSequences(pb.ListSequencesRequest(engine_id=id_)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_an_empty_engine_id_means_the_only_pool_and_an_unknown_one_is_not_found(
    stub: Stub, stream: Callable[[], Stream], read: Callable[..., Any]
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
    ("GetBlockMap", pb.GetBlockMapRequest(block_count=-1), INVALID, "block_count"),
    ("GetBlockMap", pb.GetBlockMapRequest(first_block=-1), INVALID, "first_block"),
    ("ListSequences", pb.ListSequencesRequest(page_size=-1), INVALID, "page_size"),
    ("GetRequestBlocks", pb.GetRequestBlocksRequest(request_id="a", entry_count=-1), INVALID, "entry_count"),
    ("GetRequestBlocks", pb.GetRequestBlocksRequest(), INVALID, "request_id"),
    ("ListSequences", pb.ListSequencesRequest(page_token="next"), INVALID, "page_token"),
    ("ListSequences", pb.ListSequencesRequest(page_token="9" * 5000), INVALID, "page_token"),
]


@pytest.mark.parametrize(("method", "request_", "code", "field"), OUT_OF_RANGE)
@pytest.mark.usefixtures("engine")
def test_a_read_out_of_range_is_refused_naming_its_field(
    stub: Stub, method: str, request_: Any, code: grpc.StatusCode, field: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        getattr(stub, method)(request_)
    assert (caught.value.code(), dict(caught.value.trailing_metadata())[FIELD_METADATA]) == (code, field)
    assert caught.value.details().startswith(field)


# Lookup and audit


def test_a_lookup_returns_the_cached_tokens_of_each_pool(stub: Stub, stream: Callable[[], Stream]) -> None:
    first, _ = stream().attach(engine_id="first"), stream().attach(engine_id="second", model_fingerprint="other")
    tokens = list(range(9))
    first.step(allocates=[allocate(1, tokens, salt=b"salt")])
    first.step(commits=commits((1, 0, tokens[:8])))

    def found(**request: Any) -> list[tuple[str, int, int]]:
        holdings = stub.LookupPrefix(pb.LookupPrefixRequest(**request)).holdings
        return [(one.engine_id, one.device_tokens, one.host_tokens) for one in holdings]

    assert found(token_ids=tokens, salt=b"salt") == [("first", 8, 0), ("second", 0, 0)]
    assert found(token_ids=tokens[:8], salt=b"salt", model_fingerprint="m") == [("first", 4, 0)]
    assert found(token_ids=tokens) == [("first", 0, 0), ("second", 0, 0)]
    assert found() == [("first", 0, 0), ("second", 0, 0)]


def test_an_audit_of_a_valid_pool_finds_nothing(stub: Stub, engine: Stream) -> None:
    engine.allocate(1, 9)
    assert list(stub.Audit(pb.AuditRequest()).violations) == []
    assert pools(stub)[0].totals.audits >= 1
    with pytest.raises(grpc.RpcError) as caught:
        stub.Audit(pb.AuditRequest(engine_id="nobody"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "call",
    [
        lambda stub: stub.GetPool(pb.GetPoolRequest(engine_id="x" * 20_000)),
        lambda stub: stub.Explain(pb.ExplainRequest(request_id="x" * 20_000)),
    ],
    ids=["GetPool", "Explain"],
)
def test_a_name_too_long_for_a_header_is_shortened(stub: Stub, call: Callable[[Any], Any]) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(stub)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert f"'{'x' * 200}...'" in caught.value.details()


# Reports and leases


def test_a_reported_pool_is_adopted_and_continues(stub: Stub, stream: Callable[[], Stream]) -> None:
    pool = Pool(PoolSpec("engine", 5, "m", 4, 20, 6))
    pool.apply(Step(1, allocates=[Allocate(1, 1, "a", b"salt", [7] * 9, 9), Allocate(2, 2, "b", b"", [1] * 5, 5)]))
    pool.apply(Step(2, commits=[Commit(1, 0, [7] * 8), Commit(2, 0, [1] * 4)], swap_outs=[2], pins=[Pin("pin", 1, 1)]))
    pool.apply(Step(3, pins=[Reset()], allocates=[Allocate(3, 3, "c", b"", [2] * 5, 5)]))
    pool.apply(Step(4, commits=[Commit(3, 0, [2] * 4)], frees=[Free(3, FreeReason.FINISHED)]))

    engine = stream()
    engine.send(register=register(host_blocks=6))
    for page in pages_of(report_of(pool)):
        engine.send(report=page)
    assert next(engine._call).HasField("registered")
    info = pools(stub)[0]
    assert counts_of(info.device) == pool.device.counts
    assert counts_of(info.host) == pool.host.counts
    assert info.sequences == 2
    step = Step(5, frees=[Free(1, FreeReason.FINISHED)], swap_ins=[2], allocates=[Allocate(4, 4, "d", b"", [2] * 5, 5)])
    expected = pool.apply(step).result
    engine.send(step=pb.Step(step=5, frees=[free(1)], swap_ins=[2], allocates=[allocate(4, [2] * 5)]))
    result = next(engine._call).result
    assert [list(table.block_ids) for table in tables_of(result)] == [table.block_ids for table in expected.tables]
    assert [table.cached_tokens for table in tables_of(result)] == [0, 4]
    assert list(result.host_to_device.sources) == [copy.source for copy in expected.host_to_device]
    assert counts_of(result.device) == pool.device.counts


def counts_of(message: pb.BlockCounts) -> tuple[int, int, int, int]:
    return (message.free, message.cached, message.held, message.withheld)


def test_an_older_incarnation_is_refused_during_the_lease_of_a_newer_one(
    service: Callable[..., RunningService],
) -> None:
    stub = Stub(service("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "60").channel)
    newer = Stream(stub).attach(incarnation=8)
    newer.break_off()
    older = Stream(stub)
    older.send(register=register(incarnation=7))
    assert older.refusal()[:2] == (
        grpc.StatusCode.ABORTED,
        "engine engine: incarnation 7 is older than the attached 8; each engine needs an id of its own",
    )
