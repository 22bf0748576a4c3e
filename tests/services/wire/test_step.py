from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blocks import Allocate, Commit, Extend, Fork, Free, FreeReason, Pin, Reset, Step, Unpin
from quire.v1 import kvmanager_pb2 as pb
from services.wire import step_reader
from services.wire.attach import kind_of
from services.wire.step import step_message, step_of
from services.wire.step_reader import read_step
from tests.services.wire.slicing import drain

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
        commits=items(st.builds(Commit, ids, counts, tokens)),
        pins=items(st.builds(Pin, names, ids, counts), st.builds(Unpin, names), st.builds(Reset)),
        forks=items(st.builds(Fork, ids, ids, counts)),
        frees=items(st.builds(Free, ids, st.sampled_from(FreeReason), ids)),
        swap_outs=items(ids),
        swap_ins=items(ids),
        extends=items(st.builds(Extend, ids, st.lists(rooms, max_size=3))),
        allocates=items(st.builds(Allocate, ids, ids, names, SALTS, tokens, counts, counts, WAITS)),
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
