"""The dashboard "Latency": times that clients see, and their parts."""

from deploy.grafana.panels import (
    OF_ENGINE,
    OF_MODEL,
    PHASES,
    Board,
    Panel,
    Query,
    Row,
    quantile,
    quantiles,
    rate,
    ratio,
)


def _mean(histogram: str, extra: str = "") -> str:
    selector = OF_ENGINE + extra
    return ratio(rate(f"{histogram}_sum", selector=selector), rate(f"{histogram}_count", selector=selector))


_CLIENTS = (
    Panel(
        "Time to the first token",
        "From the arrival at the gateway: queue time and prefill.",
        quantiles("quire_time_to_first_token_seconds"),
        unit="s",
    ),
    Panel(
        "Time between tokens",
        "Between two tokens of a request; tokens that arrive together share the time.",
        quantiles("quire_inter_token_latency_seconds"),
        unit="s",
    ),
    Panel(
        "Time of a request",
        "From arrival to last token, of finished requests.",
        quantiles("quire_e2e_request_latency_seconds"),
        unit="s",
    ),
    Panel(
        "First tokens in time",
        "Within the threshold of the release's alerts, in the last five minutes. The objective is 99 % unless changed.",
        (Query(f"1 - quire:slow_first_tokens:ratio_rate5m{{{OF_MODEL}}}", "{{model_name}}"),),
        unit="percentunit",
        maximum=1,
    ),
    Panel(
        "Tokens in time",
        "Within the threshold of the release's alerts, in the last five minutes. The objective is 99 % unless changed.",
        (Query(f"1 - quire:slow_tokens:ratio_rate5m{{{OF_MODEL}}}", "{{model_name}}"),),
        unit="percentunit",
        maximum=1,
    ),
    Panel(
        "Mean time per token of a request",
        "After its first, by the engine's clock.",
        quantiles("quire_request_time_per_output_token_seconds"),
        unit="s",
    ),
)
_REQUESTS = (
    Panel(
        "Queue time at the engine",
        "Until the first tokens of a request were scheduled.",
        quantiles("quire_request_queue_time_seconds"),
        unit="s",
    ),
    Panel(
        "Prefill",
        "From there to the first token.",
        quantiles("quire_request_prefill_time_seconds"),
        unit="s",
    ),
    Panel(
        "Decoding",
        "From the first token to the last.",
        quantiles("quire_request_decode_time_seconds"),
        unit="s",
    ),
    Panel(
        "Waiting requests",
        "Capacity: for blocks, a place in the batch, or their turn. Deferred: another request computes the same "
        "prefix, or the KV manager is disconnected.",
        (Query(f"quire_num_requests_waiting_by_reason{{{OF_ENGINE}}}", "{{engine}} {{reason}}"),),
    ),
    Panel(
        "Limited prefill steps",
        "Steps a second in which long prompts received a small part, because short ones were in prefill or about to be "
        "admitted.",
        (Query(rate("quire_num_limited_prefill_steps_total"), "{{engine}}"),),
        unit="ops",
    ),
    Panel(
        "Tokens of prompts and answers",
        "The median, and the value that one request in twenty exceeds.",
        (
            Query(quantile(0.5, "quire_request_prompt_tokens"), "{{engine}} prompt p50"),
            Query(quantile(0.95, "quire_request_prompt_tokens"), "{{engine}} prompt p95"),
            Query(quantile(0.5, "quire_request_generation_tokens"), "{{engine}} answer p50"),
            Query(quantile(0.95, "quire_request_generation_tokens"), "{{engine}} answer p95"),
        ),
    ),
    Panel(
        "Cancellation to free blocks",
        "From the client's disconnection to the end of the request at the engine.",
        quantiles("quire_cancel_to_free_seconds"),
        unit="s",
    ),
)
_STEPS = (
    Panel(
        "Phases of a step",
        "On average. Wait: for the KV manager's answers. Forward and sample: the model.",
        tuple(
            Query(
                ratio(
                    rate("quire_step_phase_seconds_sum", selector=f'{OF_ENGINE},phase="{phase}"'),
                    rate("quire_step_seconds_count"),
                ),
                f"{{{{engine}}}} {phase}",
            )
            for phase in PHASES
        ),
        unit="s",
        stacked=PHASES,
    ),
    Panel(
        "Step latency of the engine",
        "Model and sampling of one step.",
        quantiles("quire_step_seconds"),
        unit="s",
    ),
    Panel(
        "Latency of the KV manager's block steps",
        "Reading, applying and answering one block step.",
        quantiles("quire_kv_step_seconds"),
        unit="s",
    ),
    Panel(
        "Sequences that missed steps",
        "Share of running sequences that missed a step because the KV manager's answer was late.",
        (
            Query(
                f"{rate('quire_num_sequences_left_out_total')} / ({rate('quire_num_sequences_planned_total')} + "
                f"{rate('quire_num_sequences_left_out_total')} > 0)",
                "{{engine}}",
            ),
        ),
        unit="percentunit",
        warn=0.01,
        alarm=0.05,
    ),
    Panel(
        "Tokens in a step",
        "Mean of prompt and decoding tokens together.",
        (Query(_mean("quire_iteration_tokens_total"), "{{engine}}"),),
    ),
    Panel(
        "Steps",
        "Steps per second.",
        (Query(rate("quire_step_seconds_count"), "{{engine}}"),),
        unit="/s",
    ),
)

LATENCY = Board(
    "Latency",
    "What clients wait for, and where the time goes, by engine.",
    ("model_name", "engine"),
    (Row("What clients see", _CLIENTS), Row("A request at its engine", _REQUESTS), Row("Steps", _STEPS)),
)
