"""Invalid items of a Step: each is refused alone, and the pool does not change."""

from typing import Any

import pytest

from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from tests.services.kvmanager.attach_stream import Stream, commits, extends, pools

UNKNOWN = pb.STEP_REFUSAL_UNKNOWN
FREE = pb.Free(sequence=2, reason=pb.FREE_REASON_FINISHED)

# Sequence 1 has two blocks, sequence 2 was freed, and 9 never was.
REFUSED: dict[str, tuple[dict[str, Any], pb.StepItem.ValueType, pb.StepRefusal.ValueType]] = {
    "a free of an unknown sequence": (
        {"frees": [pb.Free(sequence=9, reason=pb.FREE_REASON_FAILED)]},
        pb.STEP_ITEM_FREE,
        UNKNOWN,
    ),
    "a commit of an unknown sequence": ({"commits": commits((9, 0, [1] * 4))}, pb.STEP_ITEM_COMMIT, UNKNOWN),
    "an extend of an unknown sequence": ({"extends": extends((1, [(9, 8)]))}, pb.STEP_ITEM_EXTEND, UNKNOWN),
    "a pin of an unknown sequence": (
        {"pins": [pb.PinChange(pin=pb.Pin(pin_id="p", sequence=9, block_count=1))]},
        pb.STEP_ITEM_PIN,
        UNKNOWN,
    ),
    "a swap of an unknown group": ({"swap_outs": [9]}, pb.STEP_ITEM_SWAP_OUT, UNKNOWN),
    "a length of an unknown sequence": ({"length_sequences": [9], "length_tokens": [1]}, pb.STEP_ITEM_LENGTH, UNKNOWN),
    "a second free": ({"frees": [FREE]}, pb.STEP_ITEM_FREE, UNKNOWN),
    "a fork of a freed parent": ({"forks": [pb.Fork(parent=2, child=3, length=1)]}, pb.STEP_ITEM_FORK, UNKNOWN),
    "an extend beyond all bounds": (
        {"extends": extends((1, [(1, 2**31 - 1)]))},
        pb.STEP_ITEM_EXTEND,
        pb.STEP_REFUSAL_OUT_OF_BLOCKS,
    ),
}


@pytest.fixture
def engine(engine: Stream) -> Stream:
    for sequence in (1, 2):
        engine.allocate(sequence, 6)
    engine.step(commits=commits((1, 0, [1] * 4)), frees=[FREE])
    return engine


def state(stub: kvmanager_pb2_grpc.KVManagerStub) -> list[Any]:
    """Read the only pool completely, without its totals."""
    (pool,) = pools(stub)
    pool.ClearField("totals")
    assert list(stub.Audit(pb.AuditRequest()).violations) == []
    return [pool, stub.ListSequences(pb.ListSequencesRequest()), stub.GetBlockMap(pb.GetBlockMapRequest())]


@pytest.mark.parametrize(("items", "item", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_an_invalid_item_is_refused_alone_and_changes_nothing(
    stub: kvmanager_pb2_grpc.KVManagerStub,
    engine: Stream,
    items: dict[str, Any],
    item: pb.StepItem.ValueType,
    reason: pb.StepRefusal.ValueType,
) -> None:
    before = state(stub)
    [refusal] = engine.apply(**items).refusals
    assert (refusal.item, refusal.index, refusal.reason, bool(refusal.detail)) == (item, 0, reason, True)
    assert state(stub) == before
    assert engine.allocate(3, 6)


def test_of_two_frees_in_one_step_the_second_is_refused(stub: kvmanager_pb2_grpc.KVManagerStub, engine: Stream) -> None:
    engine.allocate(2, 6)
    result = engine.apply(frees=[FREE, FREE])
    assert [(refusal.item, refusal.index, refusal.reason) for refusal in result.refusals] == [
        (pb.STEP_ITEM_FREE, 1, UNKNOWN)
    ]
    assert (result.device.held, [one.sequence for one in state(stub)[1].sequences]) == (2, [1])


@pytest.mark.parametrize("tokens", [5, 0, -(2**31)])
def test_an_extend_below_the_room_changes_nothing(
    stub: kvmanager_pb2_grpc.KVManagerStub, engine: Stream, tokens: int
) -> None:
    before = state(stub)
    result = engine.step(extends=extends((1, [(1, tokens)])))
    assert (result.device.held, state(stub)) == (2, before)
