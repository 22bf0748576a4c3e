"""Metrics of KV events: what is published, kept and replayed, and who reads it. Without events they have no series."""

from collections.abc import Callable, Mapping

from services.engine.events.event_stream import StreamStats
from services.engine.events.settings import PublisherStats
from services.engine.observer import EngineStats

_Values = dict[tuple[str, ...], float]
# Name, help text, labels other than model_name and engine, and the values by those labels.
_Row = tuple[str, str, tuple[str, ...], Callable[[EngineStats], _Values]]


def _of_stream(value: Callable[[StreamStats], float]) -> Callable[[EngineStats], _Values]:
    return lambda stats: {(): value(stats.events.stream)} if stats.events else {}


def _of_publisher(values: Callable[[PublisherStats], _Values]) -> Callable[[EngineStats], _Values]:
    return lambda stats: values(stats.events.publisher) if stats.events and stats.events.publisher else {}


def _by_label(counts: Mapping[str, int]) -> _Values:
    return {(label,): count for label, count in counts.items()}


GAUGES: tuple[_Row, ...] = (
    (
        "quire_kv_event_blocks",
        "Blocks that a listener without a gap knows now.",
        (),
        _of_stream(lambda stream: stream.announced_blocks),
    ),
    (
        "quire_kv_event_history_batches",
        "Batches of KV events that a listener can resume from.",
        (),
        _of_stream(lambda stream: stream.history_batches),
    ),
    (
        "quire_kv_event_history_seconds",
        "Age of the oldest of them. Who was away for longer gets a snapshot.",
        (),
        _of_stream(lambda stream: stream.history_seconds),
    ),
    (
        "quire_kv_event_connections",
        "Connections to the sockets of KV events, by socket: events or replay.",
        ("socket",),
        _of_publisher(lambda publisher: _by_label(publisher.connections)),
    ),
)
COUNTERS: tuple[_Row, ...] = (
    (
        "quire_kv_event_batches",
        "Batches of KV events published, with those that are empty because the engine is idle.",
        (),
        _of_stream(lambda stream: stream.batches),
    ),
    (
        "quire_kv_event_stored_blocks",
        "Blocks published as stored.",
        (),
        _of_stream(lambda stream: stream.stored_blocks),
    ),
    (
        "quire_kv_event_removed_blocks",
        "Blocks published as removed.",
        (),
        _of_stream(lambda stream: stream.removed_blocks),
    ),
    (
        "quire_kv_event_clears",
        "Resets of the prefix cache that were published.",
        (),
        _of_stream(lambda stream: stream.clears),
    ),
    (
        "quire_kv_event_overflows",
        "Times that a subscriber did not read until its queue was full, and missed events.",
        (),
        _of_publisher(lambda publisher: {(): publisher.dropped}),
    ),
    (
        "quire_kv_event_refused_connections",
        "Connections that were refused, by socket: more than its bound, or without an admitted key.",
        ("socket",),
        _of_publisher(lambda publisher: _by_label(publisher.refused)),
    ),
    (
        "quire_kv_event_replays",
        "Requests for replays by outcome: replayed, snapshot, or why there was no answer.",
        ("outcome",),
        _of_publisher(lambda publisher: _by_label(publisher.requests)),
    ),
    (
        "quire_kv_event_replayed_batches",
        "Batches in answers to them, of the history or of a snapshot.",
        (),
        _of_publisher(lambda publisher: {(): publisher.replayed}),
    ),
)
