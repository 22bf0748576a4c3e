from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from blocks import CondemnReason, FreeReason, StepItem, StepRefusal
from kvmanager import Event, PoolChange
from quire.v1 import kvmanager_pb2 as pb
from services.wire.duration import seconds_of
from services.wire.ledger import event_message

IDS = st.integers(-(1 << 63), (1 << 63) - 1)
BLOCKS = st.integers(1, (1 << 31) - 1)
NAMES = st.text(st.characters(codec="utf-8"), max_size=20)
EVENTS = st.builds(
    Event,
    number=IDS,
    engine_id=NAMES,
    step=IDS,
    item=st.sampled_from(StepItem) | st.none(),
    sequence=IDS,
    group=IDS,
    request_id=NAMES,
    ranges=st.lists(st.tuples(BLOCKS, BLOCKS), max_size=4).map(tuple),
    refusal=st.sampled_from(StepRefusal) | st.none(),
    detail=st.just(""),  # not on the wire
    free_reason=st.sampled_from(FreeReason) | st.none(),
    preempted_for_group=IDS,
    cached_tokens=BLOCKS,
    waited_seconds=st.integers(0, 1 << 40).map(lambda units: units / 512),
    evicted=st.lists(BLOCKS, max_size=4).map(tuple),
    prefix_of=NAMES,
    change=st.sampled_from(PoolChange) | st.none(),
    kind=NAMES,
    condemn_reason=st.sampled_from(CondemnReason) | st.none(),
    host=st.booleans(),
)


def member(kind: Any, wire: Any, number: int, prefix: str) -> Any:
    """Return the enum member of a number on the wire, None for 0."""
    return kind[wire.Name(number).removeprefix(prefix)] if number else None


def event_of(message: pb.Event) -> Event:
    return Event(
        number=message.event,
        engine_id=message.engine_id,
        step=message.step,
        item=member(StepItem, pb.StepItem, message.item, "STEP_ITEM_"),
        sequence=message.sequence,
        group=message.group,
        request_id=message.request_id,
        ranges=tuple(zip(message.range_firsts, message.range_lasts, strict=True)),
        refusal=member(StepRefusal, pb.StepRefusal, message.refusal, "STEP_REFUSAL_"),
        free_reason=member(FreeReason, pb.FreeReason, message.free_reason, "FREE_REASON_"),
        preempted_for_group=message.preempted_for_group,
        cached_tokens=message.cached_tokens,
        waited_seconds=seconds_of(message.waited),
        evicted=tuple(message.evicted_blocks),
        prefix_of=message.prefix_of,
        change=member(PoolChange, pb.PoolChange, message.pool, "POOL_CHANGE_"),
        kind=message.kind,
        condemn_reason=member(CondemnReason, pb.CondemnReason, message.condemn_reason, "CONDEMN_REASON_"),
        host=message.host,
    )


@given(EVENTS)
def test_an_event_round_trips(event: Event) -> None:
    assert event_of(pb.Event.FromString(event_message(event).SerializeToString())) == event
