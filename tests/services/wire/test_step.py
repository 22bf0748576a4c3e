from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Pin,
    Reset,
    Step,
    Trim,
    Unpin,
)
from kvmanager import limits
from quire.v1 import kvmanager_pb2 as pb
from services.runtime.errors import InvalidField
from services.wire import step_reader
from services.wire.attach import kind_of
from services.wire.step import step_message, step_of
from services.wire.step_reader import read_step
from tests.services.wire.slicing import drain, sliced

IDS = st.integers(-(1 << 63), (1 << 63) - 1)
COUNTS = st.integers(-(1 << 31), (1 << 31) - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=512)
SALTS = st.binary(max_size=512)
WAITS = st.integers(0, 1 << 30).map(lambda units: units / 512)


def steps(
    numbers: st.SearchStrategy[int],
    ids: st.SearchStrategy[int],
    counts: st.SearchStrategy[int],
    names: st.SearchStrategy[str],
    max_size: int,
) -> st.SearchStrategy[Step]:
    """Steps with up to `max_size` items of each verb."""

    def items(*kinds: st.SearchStrategy[object]) -> st.SearchStrategy[list[object]]:
        return st.lists(st.one_of(*kinds), max_size=max_size)

    tokens = st.lists(counts, max_size=20).map(lambda ids: array("i", ids))
    rooms = st.tuples(ids, counts)
    return st.builds(
        Step,
        step=numbers,
        condemns=items(
            st.builds(Condemn, ids, tokens, st.sampled_from(CondemnReason), host=st.booleans(), kind=counts)
        ),
        commits=items(st.builds(Commit, ids, counts, tokens)),
        trims=items(st.builds(Trim, ids, counts)),
        pins=items(st.builds(Pin, names, ids, counts), st.builds(Unpin, names), st.builds(Reset)),
        forks=items(st.builds(Fork, ids, ids, counts)),
        frees=items(st.builds(Free, ids, st.sampled_from(FreeReason), ids)),
        swap_outs=items(ids),
        swap_ins=items(ids),
        extends=items(st.builds(Extend, ids, st.lists(rooms, max_size=3))),
        allocates=items(
            st.builds(
                *(Allocate, ids, ids, names, SALTS, tokens, counts, counts, WAITS),
                window_spares=st.lists(counts, max_size=3).map(tuple),
            )
        ),
        lengths=items(rooms),
    )


STEPS = steps(IDS, IDS, COUNTS, NAMES, 4)


def plain(step: Step) -> dict[str, object]:
    fields = {name: value if name == "step" else list(value) for name, value in vars(step).items()}
    return fields | {"extends": [(group, list(rooms)) for group, rooms in step.extends]}


@given(STEPS)
def test_a_step_round_trips(step: Step) -> None:
    data = step_message(step).SerializeToString()
    assert kind_of(data) == "step"
    assert plain(step_of(pb.PoolRequest.FromString(data).step)) == plain(step)


@pytest.mark.parametrize("small_bytes", [0, step_reader.SMALL_BYTES])
def test_a_step_round_trips_in_slices(monkeypatch: pytest.MonkeyPatch, small_bytes: int) -> None:
    monkeypatch.setattr(step_reader, "SMALL_BYTES", small_bytes)

    @given(STEPS)
    def check(step: Step) -> None:
        assert plain(drain(read_step(step_message(step).SerializeToString())).step) == plain(step)

    check()


UNKNOWN = b"\xa0\x03\x01"  # field 52, which a later version may have


def with_unknown_field(place: str) -> pb.PoolRequest:
    request = pb.PoolRequest(
        step={
            "step": 1,
            "commits": {},
            "condemns": {},
            "extends": {},
            "allocates": [{"group": 1}],
            "frees": [{"reason": 1}],
        }
    )
    message = request.step
    for name in place.split(".")[1:]:
        message = getattr(message, name)
        message = message[0] if name in ("allocates", "frees") else message
    message.MergeFromString(UNKNOWN)
    return request


@pytest.mark.parametrize("small_bytes", [0, step_reader.SMALL_BYTES])
@pytest.mark.parametrize(
    "place", ["step", "step.commits", "step.condemns", "step.extends", "step.allocates", "step.frees"]
)
def test_a_field_that_a_later_version_has_is_refused_by_its_number(
    monkeypatch: pytest.MonkeyPatch, small_bytes: int, place: str
) -> None:
    monkeypatch.setattr(step_reader, "SMALL_BYTES", small_bytes)
    with pytest.raises(InvalidField, match=rf"^{place} has field 52, which this version does not know"):
        drain(read_step(with_unknown_field(place).SerializeToString()))


def test_an_unknown_field_of_a_long_allocate_is_refused() -> None:
    request = with_unknown_field("step.allocates")
    request.step.allocates[0].token_ids.extend(range(1 << 16))
    with pytest.raises(InvalidField, match=r"^step.allocates has field 52"):
        drain(read_step(request.SerializeToString()))


@pytest.mark.parametrize("small_bytes", [0, step_reader.SMALL_BYTES])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reasons": [9]}, r"^step\.condemns\.reasons has 9, which is not a CondemnReason"),
        ({"reasons": [0]}, r"^step\.condemns\.reasons has 0, which is not a CondemnReason"),
        ({"tiers": [3]}, r"^step\.condemns\.tiers has 3, which is not a Tier"),
        ({"tiers": [1, 2]}, r"^step\.condemns: the arrays differ in length"),
        ({"block_counts": [2]}, r"^step\.condemns: the counts add up to 2, but there are 1 entries"),
        ({"block_counts": [-1]}, r"^step\.condemns: counts must not be negative"),
    ],
)
def test_a_malformed_condemn_is_refused_by_its_field(
    monkeypatch: pytest.MonkeyPatch, small_bytes: int, fields: dict[str, list[int]], message: str
) -> None:
    monkeypatch.setattr(step_reader, "SMALL_BYTES", small_bytes)
    columns = {"sequences": [1], "reasons": [1], "tiers": [1], "kinds": [0], "block_counts": [1], "block_ids": [5]}
    request = pb.PoolRequest(step={"step": 1, "condemns": columns | fields})
    with pytest.raises(InvalidField, match=message):
        drain(read_step(request.SerializeToString()))


def test_a_step_condemns_at_most_131_072_blocks() -> None:
    most = limits.MAX_CONDEMNED_BLOCKS
    assert most == 131_072
    step = Step(1, condemns=[Condemn(0, range(1, most + 1), CondemnReason.ADOPTION)])
    data = step_message(step).SerializeToString()
    result, pauses = sliced(read_step(data))
    assert list(result.step.condemns[0].blocks) == list(range(1, most + 1))
    assert pauses > most // 8192
    more = Step(1, condemns=[*step.condemns, Condemn(0, [1], CondemnReason.COPY)])
    with pytest.raises(InvalidField, match=r"^step\.condemns\.block_ids must have at most 131072 entries"):
        drain(read_step(step_message(more).SerializeToString()))


def test_the_tier_of_a_condemn_that_is_not_specified_is_the_device() -> None:
    columns = {"sequences": [0], "reasons": [5], "tiers": [0], "kinds": [2], "block_counts": [1], "block_ids": [5]}
    message = pb.Step(step=1, condemns=columns)
    assert plain(step_of(message))["condemns"] == [Condemn(0, array("i", [5]), CondemnReason.COPY, False, 2)]
