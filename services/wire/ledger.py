"""Events of the ledger."""

from kvmanager import Event, PoolChange
from quire.v1 import kvmanager_pb2 as pb
from services.wire.duration import duration
from services.wire.step import CONDEMN_REASONS, FREE_REASONS
from services.wire.step_result import ITEMS, REFUSALS

_CHANGES = {change: pb.PoolChange.Value(f"POOL_CHANGE_{change.name}") for change in PoolChange}


def event_message(event: Event) -> pb.Event:
    """Write an event."""
    return pb.Event(
        event=event.number,
        engine_id=event.engine_id,
        step=event.step,
        item=ITEMS[event.item] if event.item else pb.STEP_ITEM_UNSPECIFIED,
        sequence=event.sequence,
        group=event.group,
        request_id=event.request_id,
        range_firsts=[first for first, _ in event.ranges],
        range_lasts=[last for _, last in event.ranges],
        refusal=REFUSALS[event.refusal] if event.refusal else pb.STEP_REFUSAL_UNSPECIFIED,
        free_reason=FREE_REASONS[event.free_reason] if event.free_reason else pb.FREE_REASON_UNSPECIFIED,
        preempted_for_group=event.preempted_for_group,
        cached_tokens=event.cached_tokens,
        waited=duration(event.waited_seconds) if event.waited_seconds else None,
        evicted_blocks=event.evicted,
        prefix_of=event.prefix_of,
        pool=_CHANGES[event.change] if event.change else pb.POOL_CHANGE_UNSPECIFIED,
        condemn_reason=CONDEMN_REASONS[event.condemn_reason] if event.condemn_reason else pb.CONDEMN_REASON_UNSPECIFIED,
        host=event.host,
        kind=event.kind,
    )
