"""The dashboard "Overview": services that are up, load, and results for clients."""

from deploy.grafana.engine_panels import HELD_SHARE, PREEMPTIONS, PREFIX_CACHE_HIT_RATE
from deploy.grafana.panels import (
    BY_RELEASE,
    OF_JOBS,
    OF_MODEL,
    OF_RELEASE,
    RATE,
    Board,
    Figure,
    Panel,
    Query,
    Row,
    quantiles,
    rate,
    ratio,
)

_BY_MODEL = f"{BY_RELEASE}, model_name"


def _of_model(counter: str, label: str = "", extra: str = "") -> str:
    return rate(counter, f"model_name, {label}" if label else "model_name", OF_MODEL + extra)


_NOW = (
    Figure(
        "Services up",
        "Processes of each service that Prometheus reaches.",
        (Query(f"sum by ({BY_RELEASE}, job) (up{{{OF_JOBS}}})", "{{job}}"),),
    ),
    Figure(
        "Alerts",
        "Alerts that fire now. docs/alerts.md has a runbook for each.",
        (
            Query(
                f'count by ({BY_RELEASE}) (ALERTS{{{OF_RELEASE},alertname=~"Quire.*",alertstate="firing"}}) or '
                f"0 * count by ({BY_RELEASE}) (up{{{OF_JOBS}}})",
                "firing",
            ),
        ),
        warn=1,
        alarm=3,
    ),
    Figure(
        "Connected engines",
        "Engines whose pool is connected to the KV manager.",
        (Query(f"count by ({_BY_MODEL}) (quire_kv_pool_connected{{{OF_MODEL}}} == 1)", "{{model_name}}"),),
    ),
    Figure(
        "Requests in flight",
        "Admitted and not ended.",
        (Query(f"sum by ({_BY_MODEL}) (quire_open_streams{{{OF_MODEL}}})", "{{model_name}}"),),
    ),
    Figure(
        "Waiting requests",
        "At engines, for blocks or for a place in the batch.",
        (Query(f"sum by ({_BY_MODEL}) (quire_num_requests_waiting{{{OF_MODEL}}})", "{{model_name}}"),),
    ),
    Figure(
        "Held share of the pools",
        "Blocks that running requests hold, of all blocks, in the kind of blocks that has the least room.",
        (
            Query(
                f"max by ({_BY_MODEL}) ("
                f'sum by ({_BY_MODEL}, kind) (quire_kv_blocks{{{OF_MODEL},tier="device",state="held"}}) / '
                f'sum by ({_BY_MODEL}, kind) (quire_kv_pool_blocks{{{OF_MODEL},tier="device"}}))',
                "{{model_name}}",
            ),
        ),
        unit="percentunit",
        warn=0.9,
        alarm=0.98,
    ),
)
_TRAFFIC = (
    Panel(
        "Ended requests",
        "By reason: stop and length are complete, abort was cancelled by its client or late, error failed.",
        (
            Query(
                _of_model("quire_request_success_total", "finished_reason"),
                "{{model_name}} {{finished_reason}}",
            ),
        ),
        unit="/s",
    ),
    Panel(
        "Tokens",
        "Prompt tokens, computed or cached, and generated tokens.",
        (
            Query(_of_model("quire_prompt_tokens_by_source_total", "source"), "{{model_name}} prompt {{source}}"),
            Query(_of_model("quire_generation_tokens_total"), "{{model_name}} generated"),
        ),
        unit="tokens/s",
    ),
    Panel(
        "Requests in flight and waiting",
        "In flight: admitted by the gateway. Running requests hold blocks, waiting ones do not.",
        (
            Query(f"sum by ({_BY_MODEL}) (quire_open_streams{{{OF_MODEL}}})", "{{model_name}} in flight"),
            Query(f"sum by ({_BY_MODEL}) (quire_num_requests_running{{{OF_MODEL}}})", "{{model_name}} running"),
            Query(f"sum by ({_BY_MODEL}) (quire_num_requests_waiting{{{OF_MODEL}}})", "{{model_name}} waiting"),
        ),
    ),
    Panel(
        "Rejected requests",
        "By reason.",
        (Query(_of_model("quire_admission_rejections_total", "reason"), "{{model_name}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "Invalid requests",
        "By the field for which they were refused: clients that send it must change.",
        (Query(_of_model("quire_invalid_requests_total", "field"), "{{model_name}} {{field}}"),),
        unit="/s",
    ),
    Panel(
        "Calls of tools",
        "In answers over HTTP, by dialect, and what is no call or no whole one. Many no-call: the model writes another"
        " form, or calls tools that were not offered.",
        (
            Query(_of_model("quire_tool_calls_total", "dialect"), "{{model_name}} {{dialect}}"),
            Query(
                _of_model("quire_tool_call_parse_failures_total", "dialect, kind"),
                "{{model_name}} {{dialect}} {{kind}}",
            ),
        ),
        unit="/s",
    ),
    Panel(
        "Routing",
        "By engine and reason: prefix has most of the prompt, load has less load, new has the least load.",
        (Query(rate("quire_routed_requests_total", "engine, reason"), "{{engine}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "HTTP answers",
        "By status; 499: the client closed first.",
        (Query(rate("quire_http_requests_total", "status", OF_RELEASE), "{{status}}"),),
        unit="/s",
    ),
)
_CLIENTS = (
    Panel(
        "Time to the first token",
        "As clients see it: queue time and prefill.",
        quantiles("quire_time_to_first_token_seconds", "model_name", OF_MODEL),
        unit="s",
    ),
    Panel(
        "Time between tokens",
        "As clients see it.",
        quantiles("quire_inter_token_latency_seconds", "model_name", OF_MODEL),
        unit="s",
    ),
    Panel(
        "Share outside the objectives",
        "In the last five minutes: failed requests, first tokens and other tokens later than the thresholds of the "
        "release's alerts. At the budgets (0.1 %, 1 % and 1 % unless changed) they last a month.",
        (
            Query(f"quire:errors:ratio_rate5m{{{OF_MODEL}}}", "{{model_name}} errors"),
            Query(f"quire:slow_first_tokens:ratio_rate5m{{{OF_MODEL}}}", "{{model_name}} first tokens"),
            Query(f"quire:slow_tokens:ratio_rate5m{{{OF_MODEL}}}", "{{model_name}} tokens"),
        ),
        unit="percentunit",
    ),
    Panel(
        "Deadlines exceeded",
        "Queued: no engine had started the request.",
        (Query(_of_model("quire_deadline_exceeded_total", "phase"), "{{model_name}} {{phase}}"),),
        unit="/s",
    ),
    Panel(
        "Failovers",
        "Requests that continued at another engine. Lost: the link broke; drained: the engine was stopped.",
        (Query(rate("quire_failovers_total", "engine, reason"), "{{engine}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "Slow clients",
        "Streams ended because the client read too slowly.",
        (Query(_of_model("quire_slow_clients_total"), "{{model_name}}"),),
        unit="/s",
    ),
)
_ENGINES = (
    HELD_SHARE,
    PREFIX_CACHE_HIT_RATE,
    PREEMPTIONS,
    Panel(
        "Draft tokens that were accepted",
        "Of those that were verified. There are none without --speculate-ngram, or where they do not pay.",
        (
            Query(
                ratio(
                    rate("quire_spec_decode_num_accepted_tokens_total"),
                    rate("quire_spec_decode_num_draft_tokens_total"),
                ),
                "{{engine}}",
            ),
        ),
        unit="percentunit",
        maximum=1,
    ),
    Panel(
        "Sequences in a step",
        "Mean size of the batch.",
        (
            Query(
                ratio(rate("quire_num_sequences_planned_total"), rate("quire_step_seconds_count")),
                "{{engine}}",
            ),
        ),
    ),
    Panel(
        "CPU",
        "Cores in use by each process.",
        (Query(f"rate(process_cpu_seconds_total{{{OF_JOBS}}}{RATE})", "{{job}} {{instance}}"),),
    ),
    Panel(
        "Memory",
        "Resident memory of each process; an engine's includes the model and the host blocks.",
        (Query(f"process_resident_memory_bytes{{{OF_JOBS}}}", "{{job}} {{instance}}"),),
        unit="bytes",
    ),
)

OVERVIEW = Board(
    "Overview",
    "Which services run, what arrives, and what clients get.",
    ("model_name", "engine"),
    (
        Row("Now", _NOW),
        Row("Traffic", _TRAFFIC),
        Row("What clients get", _CLIENTS),
        Row("Engines and processes", _ENGINES),
    ),
)
