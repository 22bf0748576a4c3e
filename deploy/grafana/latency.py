"""The dashboard "Latency": what clients wait for, and where the time goes."""

from deploy.grafana.panels import OF_ENGINE, PHASES, RATE, Board, Panel, Query, Row, quantile, quantiles, rate, ratio


def _mean(histogram: str, extra: str = "") -> str:
    selector = OF_ENGINE + extra
    return ratio(rate(f"{histogram}_sum", selector=selector), rate(f"{histogram}_count", selector=selector))


def _within(histogram: str, bound: str) -> str:
    return ratio(
        rate(f"{histogram}_bucket", selector=f'{OF_ENGINE},le="{bound}"'),
        rate(f"{histogram}_count"),
    )


_CLIENTS = (
    Panel(
        "Time to the first token",
        "From a request's arrival at the gateway: waiting, and the prompt.",
        quantiles("quire_time_to_first_token_seconds"),
        unit="s",
    ),
    Panel(
        "Time between tokens",
        "Between two tokens of a request; tokens that came together share the time.",
        quantiles("quire_inter_token_latency_seconds"),
        unit="s",
    ),
    Panel(
        "Time of a request",
        "From its arrival to its last token, of requests that were finished.",
        quantiles("quire_e2e_request_latency_seconds"),
        unit="s",
    ),
    Panel(
        "First tokens within 2.5 s",
        "The objective is 99 %.",
        (Query(_within("quire_time_to_first_token_seconds", "2.5"), "{{engine}}"),),
        unit="percentunit",
        most=1,
    ),
    Panel(
        "Tokens within 0.2 s",
        "The objective is 99 %.",
        (Query(_within("quire_inter_token_latency_seconds", "0.2"), "{{engine}}"),),
        unit="percentunit",
        most=1,
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
        "Waiting in the engine",
        "Until a request's first tokens were scheduled.",
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
        "Requests that wait",
        "Capacity: for blocks or a place in the batch. Deferred: another request computes the same beginning, or the "
        "KV manager is away.",
        (Query(f"quire_num_requests_waiting_by_reason{{{OF_ENGINE}}}", "{{engine}} {{reason}}"),),
    ),
    Panel(
        "Tokens of prompts and answers",
        "The median and what one request in twenty is above: long ones take long.",
        (
            Query(quantile(0.5, "quire_request_prompt_tokens"), "{{engine}} prompt p50"),
            Query(quantile(0.95, "quire_request_prompt_tokens"), "{{engine}} prompt p95"),
            Query(quantile(0.5, "quire_request_generation_tokens"), "{{engine}} answer p50"),
            Query(quantile(0.95, "quire_request_generation_tokens"), "{{engine}} answer p95"),
        ),
    ),
    Panel(
        "From a client's leaving to free blocks",
        "What giving up costs.",
        quantiles("quire_cancel_to_free_seconds"),
        unit="s",
    ),
)
_STEPS = (
    Panel(
        "Where the time of a step goes",
        "On average. Wait: for the KV manager's answers. Forward and sample are the model's.",
        tuple(
            Query(
                f'sum by (engine) (rate(quire_step_phase_seconds_sum{{{OF_ENGINE},phase="{phase}"}}{RATE})) / '
                f"({rate('quire_step_seconds_count')} > 0)",
                f"{{{{engine}}}} {phase}",
            )
            for phase in PHASES
        ),
        unit="s",
        stacked=PHASES,
    ),
    Panel(
        "Step of the engine",
        "Model and sampling of one step.",
        quantiles("quire_step_seconds"),
        unit="s",
    ),
    Panel(
        "Step of the KV manager",
        "Reading, applying and answering the block operations of one step.",
        quantiles("quire_kv_step_seconds"),
        unit="s",
    ),
    Panel(
        "Sequences left out of steps",
        "Share of running sequences that sat out a step because the KV manager's answer was not there.",
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
        "Of prompts and of decoding sequences together, on average.",
        (Query(_mean("quire_iteration_tokens_total"), "{{engine}}"),),
    ),
    Panel(
        "Steps",
        "A second.",
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
