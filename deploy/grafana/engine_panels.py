"""Panels of an engine's pool that several dashboards share."""

from deploy.grafana.panels import OF_ENGINE, Panel, Query, rate, ratio

HELD_SHARE = Panel(
    "Share of the pool that is held",
    "Near 1, new requests wait and running ones are preempted.",
    (Query(f"quire_kv_cache_usage_perc{{{OF_ENGINE}}}", "{{engine}}"),),
    unit="percentunit",
    maximum=1,
    warn=0.9,
    alarm=0.98,
)
PREFIX_CACHE_HIT_RATE = Panel(
    "Prefix cache hit rate",
    "Prompt tokens hit, of all that were looked up.",
    (
        Query(
            ratio(rate("quire_prefix_cache_hits_total"), rate("quire_prefix_cache_queries_total")),
            "{{engine}}",
        ),
    ),
    unit="percentunit",
    maximum=1,
)
PREEMPTIONS = Panel(
    "Preemptions",
    "Running requests that lost their blocks to others, per second.",
    (Query(rate("quire_num_preemptions_total"), "{{engine}}"),),
    unit="/s",
    warn=0.001,
    alarm=1,
)
KV_EVENTS = Panel(
    "KV events",
    "Blocks that routers of others learn to be stored or removed, and the batches of events, per second. An idle "
    "engine publishes empty batches.",
    (
        Query(rate("quire_kv_events_blocks_total", "engine, change"), "{{engine}} {{change}}"),
        Query(rate("quire_kv_events_batches_total"), "{{engine}} batches"),
    ),
    unit="/s",
)
SUBSCRIBERS = Panel(
    "Subscribers of KV events",
    "Connections to the sockets of KV events, and streams to smg. Without any, routers choose engines blindly.",
    (
        Query(f"quire_kv_events_connections{{{OF_ENGINE}}}", "{{engine}} {{socket}}"),
        Query(f"quire_smg_subscribers{{{OF_ENGINE}}}", "{{engine}} smg"),
    ),
)
MISSED_EVENTS = Panel(
    "Missed KV events",
    "Times that a subscriber missed events because it did not read, that one of smg fell behind, and that a connection "
    "was refused, or ended because it sent too much. Subscribers ask for what they missed, or get a snapshot.",
    (
        Query(rate("quire_kv_events_overflows_total"), "{{engine}} missed"),
        Query(rate("quire_smg_catch_ups_total"), "{{engine}} smg behind"),
        Query(rate("quire_kv_events_refused_connections_total", "engine, socket"), "{{engine}} {{socket}} refused"),
        Query(rate("quire_kv_events_ended_connections_total", "engine, socket"), "{{engine}} {{socket}} ended"),
    ),
    unit="/s",
    warn=0.001,
)
REPLAYS = Panel(
    "Replays and snapshots of KV events",
    "Requests of subscribers by outcome: replayed, snapshot, or why there was no answer; and snapshots for smg.",
    (
        Query(rate("quire_kv_events_replay_requests_total", "engine, outcome"), "{{engine}} {{outcome}}"),
        Query(rate("quire_smg_snapshots_total"), "{{engine}} smg snapshot"),
    ),
    unit="/s",
)
