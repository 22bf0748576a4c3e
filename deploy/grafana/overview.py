"""The dashboard "Overview": whether everything is there, what comes in, and what clients get."""

from deploy.grafana.engine_panels import HELD_SHARE, PREEMPTIONS, PREFIX_CACHE_HIT_RATE
from deploy.grafana.panels import OF_MODEL, RATE, Board, Figure, Panel, Query, Row, quantiles, rate, ratio

_JOBS = 'job=~".*quire.*"'


def _of_model(counter: str, label: str = "", extra: str = "") -> str:
    return rate(counter, f"model_name, {label}" if label else "model_name", OF_MODEL + extra)


_NOW = (
    Figure(
        "Services that answer",
        "Prometheus reaches so many of each.",
        (Query(f"sum by (job) (up{{{_JOBS}}})", "{{job}}"),),
    ),
    Figure(
        "Alerts",
        "Alerts that fire now. docs/alerts.md has a runbook for each.",
        (Query('count(ALERTS{alertname=~"Quire.*",alertstate="firing"}) or vector(0)', "firing"),),
        warn=1,
        alarm=3,
    ),
    Figure(
        "Engines at work",
        "Engines whose pool is connected to the KV manager.",
        (Query(f"count by (model_name) (quire_kv_pool_connected{{{OF_MODEL}}} == 1)", "{{model_name}}"),),
    ),
    Figure(
        "Requests under way",
        "Let in, and not ended.",
        (Query(f"sum by (model_name) (quire_open_streams{{{OF_MODEL}}})", "{{model_name}}"),),
    ),
    Figure(
        "Requests that wait",
        "At engines, for blocks or for a place in the batch.",
        (Query(f"sum by (model_name) (quire_num_requests_waiting{{{OF_MODEL}}})", "{{model_name}}"),),
    ),
    Figure(
        "Held share of the pools",
        "Of all blocks, those that running requests need.",
        (
            Query(
                f'sum by (model_name) (quire_kv_blocks{{{OF_MODEL},tier="device",state="held"}}) / '
                f'sum by (model_name) (quire_kv_pool_blocks{{{OF_MODEL},tier="device"}})',
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
        "Requests that ended",
        "By how: stop and length were finished, abort was left by its client or late, error failed.",
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
        "Of prompts, computed or found in the prefix cache, and of answers.",
        (
            Query(_of_model("quire_prompt_tokens_by_source_total", "source"), "{{model_name}} prompt {{source}}"),
            Query(_of_model("quire_generation_tokens_total"), "{{model_name}} generated"),
        ),
        unit="tokens/s",
    ),
    Panel(
        "Requests under way and waiting",
        "Under way: let in by the gateway. Running requests hold blocks, waiting ones do not.",
        (
            Query(f"sum by (model_name) (quire_open_streams{{{OF_MODEL}}})", "{{model_name}} under way"),
            Query(f"sum by (model_name) (quire_num_requests_running{{{OF_MODEL}}})", "{{model_name}} running"),
            Query(f"sum by (model_name) (quire_num_requests_waiting{{{OF_MODEL}}})", "{{model_name}} waiting"),
        ),
    ),
    Panel(
        "Refused requests",
        "Not let in, by reason.",
        (Query(_of_model("quire_admission_rejections_total", "reason"), "{{model_name}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "Where requests go",
        "By engine and what decided: prefix has most of the prompt, load has less to do, new has least to do.",
        (Query(rate("quire_routed_requests_total", "engine, reason"), "{{engine}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "Answers over HTTP",
        "By status; 499: the client left before.",
        (Query(f"sum by (status) (rate(quire_http_requests_total{RATE}))", "{{status}}"),),
        unit="/s",
    ),
)
_CLIENTS = (
    Panel(
        "Time to the first token",
        "As clients see it: waiting, and the prompt.",
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
        "Of the last five minutes: requests that failed, first tokens later than 2.5 s, tokens later than 0.2 s. At "
        "0.1 %, 1 % and 1 % the budgets of a month last a month.",
        (
            Query(f"quire:errors:ratio_rate5m{{{OF_MODEL}}}", "{{model_name}} errors"),
            Query(f"quire:slow_first_tokens:ratio_rate5m{{{OF_MODEL}}}", "{{model_name}} first tokens"),
            Query(f"quire:slow_tokens:ratio_rate5m{{{OF_MODEL}}}", "{{model_name}} tokens"),
        ),
        unit="percentunit",
    ),
    Panel(
        "Deadlines that passed",
        "Queued: no engine had begun the request.",
        (Query(_of_model("quire_deadline_exceeded_total", "phase"), "{{model_name}} {{phase}}"),),
        unit="/s",
    ),
    Panel(
        "Requests that lost their engine",
        "They went on at another one. Lost: its link broke; drained: it was stopped.",
        (Query(rate("quire_failovers_total", "engine, reason"), "{{engine}} {{reason}}"),),
        unit="/s",
    ),
    Panel(
        "Clients that do not read",
        "Streams that were ended for it.",
        (Query(_of_model("quire_slow_clients_total"), "{{model_name}}"),),
        unit="/s",
    ),
)
_ENGINES = (
    HELD_SHARE,
    PREFIX_CACHE_HIT_RATE,
    PREEMPTIONS,
    Panel(
        "Sequences in a step",
        "On average: how full the batch is.",
        (
            Query(
                ratio(rate("quire_num_sequences_planned_total"), rate("quire_step_seconds_count")),
                "{{engine}}",
            ),
        ),
    ),
    Panel(
        "Processor",
        "Cores that each process keeps busy.",
        (Query(f"rate(process_cpu_seconds_total{{{_JOBS}}}{RATE})", "{{job}} {{instance}}"),),
    ),
    Panel(
        "Memory",
        "Resident memory of each process; an engine's has the model and the host's blocks in it.",
        (Query(f"process_resident_memory_bytes{{{_JOBS}}}", "{{job}} {{instance}}"),),
        unit="bytes",
    ),
)

OVERVIEW = Board(
    "Overview",
    "Whether everything is there, what comes in, and what clients get.",
    ("model_name", "engine"),
    (
        Row("Now", _NOW),
        Row("Traffic", _TRAFFIC),
        Row("What clients get", _CLIENTS),
        Row("Engines and processes", _ENGINES),
    ),
)
