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
