from hypothesis import given
from hypothesis import strategies as st

from blocks import Copy, Refusal, StepItem, StepRefusal, StepResult, TableChange
from kvmanager import AppliedStep, BlockCounts, Seal
from quire.v1 import kvmanager_pb2 as pb
from services.wire.step_result import result_message, result_of
from tests.services.wire.slicing import drain, sliced

IDS = st.integers(-(1 << 63), (1 << 63) - 1)
BLOCKS = st.integers(1, (1 << 31) - 1)
COUNTS = st.integers(0, 1 << 24)
KEYS = st.binary(min_size=32, max_size=32)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
COPIES = st.lists(st.builds(Copy, BLOCKS, BLOCKS), max_size=4).map(tuple)
TABLES = st.builds(TableChange, IDS, COUNTS, st.lists(BLOCKS, max_size=4), COUNTS, COUNTS)
REFUSALS = st.builds(Refusal, st.sampled_from(StepItem), COUNTS, st.sampled_from(StepRefusal), TEXTS)


@st.composite
def results(draw: st.DrawFn) -> AppliedStep:
    device, host = (BlockCounts(*draw(st.tuples(COUNTS, COUNTS, COUNTS, COUNTS))) for _ in range(2))
    result = StepResult(
        step=draw(IDS),
        refusals=tuple(draw(st.lists(REFUSALS, max_size=3))),
        tables=tuple(draw(st.lists(TABLES, max_size=3))),
        copies=draw(COPIES),
        available_blocks=device.available,
        available_host_blocks=host.available,
        device_to_host=draw(COPIES),
        host_to_device=draw(COPIES),
        withheld_blocks=tuple(draw(st.lists(BLOCKS, max_size=3))),
        host_withheld_blocks=tuple(draw(st.lists(BLOCKS, max_size=3))),
    )
    sealed = draw(st.lists(st.tuples(BLOCKS, KEYS), max_size=3))
    return AppliedStep(
        result=result,
        effects=[],
        device=device,
        host=host,
        sealed_blocks=[block for block, _ in sealed],
        sealed_keys=[key for _, key in sealed],
        host_sealed=[Seal(*one) for one in draw(st.lists(st.tuples(BLOCKS, KEYS), max_size=3))],
        evicted=[],
        granted_blocks=0,
        hit_tokens=0,
        query_tokens=0,
    )


@given(results())
def test_a_result_round_trips(applied: AppliedStep) -> None:
    message = pb.StepResult.FromString(drain(result_message(applied)).SerializeToString())
    assert result_of(message) == applied.result


@given(results())
def test_a_result_has_sealed_keys_and_block_counts(applied: AppliedStep) -> None:
    message = drain(result_message(applied))
    keys = [message.sealed_keys[start : start + 32] for start in range(0, len(message.sealed_keys), 32)]
    assert list(map(Seal, message.sealed_blocks, keys)) == applied.sealed
    assert len(message.host_sealed_blocks) * 32 == len(message.host_sealed_keys)
    assert [getattr(message.device, name) for name in BlockCounts._fields] == list(applied.device)
    assert [getattr(message.host, name) for name in BlockCounts._fields] == list(applied.host)


def test_a_large_result_is_written_in_slices_and_round_trips() -> None:
    many = range(1, 10_001)
    result = StepResult(
        step=1,
        refusals=tuple(Refusal(StepItem.EXTEND, index, StepRefusal.OUT_OF_BLOCKS, "no") for index in many),
        tables=tuple(TableChange(number, 0, [number], 4) for number in many),
        copies=tuple(Copy(number, number + 1) for number in many),
        available_blocks=0,
    )
    counts = BlockCounts(0, 0, 0)
    seals = [Seal(number, bytes(32)) for number in many]
    work = result_message(
        AppliedStep(result, [], counts, counts, list(many), [bytes(32)] * len(many), seals, [], 0, 0, 0)
    )
    message, pauses = sliced(work)
    assert pauses > 80
    assert result_of(message) == result
