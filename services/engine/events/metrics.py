"""Prometheus metrics of KV events, as tables, like the engine's. They have no series without events."""

from collections.abc import Callable, Mapping

from services.engine.events.event_stream import StreamStats
from services.engine.events.settings import PublisherStats
from services.engine.observer import EngineStats

Values = dict[tuple[str, ...], float]
Metrics = tuple[tuple[str, str, tuple[str, ...], Callable[[EngineStats], Values]], ...]


def _of_stream(values: Callable[[StreamStats], Values]) -> Callable[[EngineStats], Values]:
    return lambda stats: values(stats.events.stream) if stats.events else {}


def _of_sockets(values: Callable[[PublisherStats], Values]) -> Callable[[EngineStats], Values]:
    return lambda stats: values(stats.events.publisher) if stats.events and stats.events.publisher else {}


def _labelled(counts: Mapping[str, int]) -> Values:
    return {(name,): count for name, count in counts.items()}


# Name, help text, labels other than model_name and engine, and the values by those labels.
EVENT_GAUGES: Metrics = (
    (
        "quire_kv_events_announced_blocks",
        "Blocks that subscribers of KV events have by now, if they missed nothing; a block in two tiers counts twice.",
        (),
        _of_stream(lambda stream: {(): stream.announced_blocks}),
    ),
    (
        "quire_kv_events_history_batches",
        "Batches of KV events that are kept for replay.",
        (),
        _of_stream(lambda stream: {(): stream.history_batches}),
    ),
    (
        "quire_kv_events_history_seconds",
        "Age of the oldest batch of KV events that is kept: who was away for longer gets a snapshot.",
        (),
        _of_stream(lambda stream: {(): stream.history_seconds}),
    ),
    (
        "quire_kv_events_connections",
        "Open connections of KV events by socket: events or replay.",
        ("socket",),
        _of_sockets(lambda sockets: _labelled(sockets.connections)),
    ),
)
EVENT_COUNTERS: Metrics = (
    (
        "quire_kv_events_batches",
        "Batches of KV events, heartbeats among them.",
        (),
        _of_stream(lambda stream: {(): stream.batches}),
    ),
    (
        "quire_kv_events_blocks",
        "Blocks announced by change: stored or removed.",
        ("change",),
        _of_stream(lambda stream: {("stored",): stream.stored_blocks, ("removed",): stream.removed_blocks}),
    ),
    (
        "quire_kv_events_clears",
        "Announcements that no block is left.",
        (),
        _of_stream(lambda stream: {(): stream.clears}),
    ),
    (
        "quire_kv_events_overflows",
        "Times that a subscriber did not read until its queue was full; the batches that it then missed are not known.",
        (),
        _of_sockets(lambda sockets: {(): sockets.overflows}),
    ),
    (
        "quire_kv_events_refused_connections",
        "Connections of KV events that ended in the handshake, by socket: without the right key, or another protocol.",
        ("socket",),
        _of_sockets(lambda sockets: _labelled(sockets.refused)),
    ),
    (
        "quire_kv_events_ended_connections",
        "Connections of KV events that were ended by the engine because they sent too much, by socket.",
        ("socket",),
        _of_sockets(lambda sockets: _labelled(sockets.ended)),
    ),
    (
        "quire_kv_events_replay_requests",
        "Requests for a replay of KV events by outcome: replayed, snapshot, malformed, queue_full, stalled, overtaken.",
        ("outcome",),
        _of_sockets(lambda sockets: _labelled(sockets.requests)),
    ),
    (
        "quire_kv_events_replayed_batches",
        "Batches in the answers to requests for a replay, those of snapshots among them.",
        (),
        _of_sockets(lambda sockets: {(): sockets.replayed}),
    ),
)
