"""The metrics of KV events are the numbers of the stream and of its sockets."""

from prometheus_client import CollectorRegistry

from engine.schedule.stats import SchedulerTotals
from services.engine.events.event_stream import StreamStats
from services.engine.events.settings import PublisherStats
from services.engine.metrics import EngineMetrics
from services.engine.observer import EngineStats, EventStats

STREAM = StreamStats(
    batches=7,
    stored_blocks=40,
    removed_blocks=9,
    clears=2,
    announced_blocks=31,
    history_batches=5,
    history_seconds=12.5,
)
PUBLISHER = PublisherStats(
    3, {"events": 2, "replay": 1}, {"events": 4, "replay": 0}, {"replayed": 5, "snapshot": 6, "stalled": 1}, 50
)
OF_STREAM = {
    "batches_total": {"": 7.0},
    "stored_blocks_total": {"": 40.0},
    "removed_blocks_total": {"": 9.0},
    "clears_total": {"": 2.0},
    "blocks": {"": 31.0},
    "history_batches": {"": 5.0},
    "history_seconds": {"": 12.5},
}
OF_SOCKETS = {
    "overflows_total": {"": 3.0},
    "connections": {"events": 2.0, "replay": 1.0},
    "refused_connections_total": {"events": 4.0, "replay": 0.0},
    "replays_total": {"replayed": 5.0, "snapshot": 6.0, "stalled": 1.0},
    "replayed_batches_total": {"": 50.0},
}


def shown(events: EventStats | None) -> dict[str, dict[str, float]]:
    """Return the values by the names behind `quire_kv_event_`, and by the label besides those of all metrics."""
    metrics = EngineMetrics()
    metrics.on_start("m", "e", lambda: EngineStats(0, 0, SchedulerTotals(), events=events))
    registry: CollectorRegistry = metrics.registry
    found: dict[str, dict[str, float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.startswith("quire_kv_event_"):
                (label,) = {name: value for name, value in sample.labels.items() if value not in "me"}.values() or ("",)
                found.setdefault(sample.name.removeprefix("quire_kv_event_"), {})[label] = sample.value
    return found


def test_each_number_of_stream_and_sockets_is_exported() -> None:
    assert shown(EventStats(STREAM, PUBLISHER)) == OF_STREAM | OF_SOCKETS


def test_a_stream_to_smg_alone_has_no_metrics_of_sockets() -> None:
    assert shown(EventStats(STREAM, None)) == OF_STREAM


def test_without_events_there_are_no_series() -> None:
    assert shown(None) == {}
