"""The table of weights by form: speed, perplexity and distance from float32, from the results of `bench weights`."""

import re
from collections.abc import Mapping
from typing import Any

# Forms of weights and peers, by the first part of metrics' names.
_FORMS = {
    "float32": "float32",
    "bf16": "bfloat16",
    "int8": "int8, a scale for each output",
    "int4": "4 bits, as in the file",
    "int8_kv": "bfloat16, KV cache int8",
    "openvino_bf16": "bfloat16",
    "openvino_int8": "int8",
    "openvino_int4": "int4",
    "llamacpp": "the same file",
    "vllm": "bfloat16",
}
# The line of the 4-bit file's speed over that of the best peer, each as its users run it.
_OVER, _OVER_METRIC = "4 bits over the best peer, as users run them", "int4_{}_over_the_best_peer_as_users_run_it"
# Columns: a title, the metric without its form, the format of a value, and what follows it.
_COLUMNS = (
    ("1 request", "b1_tokens_per_second", ",.0f", ""),
    ("32 requests", "b32_tokens_per_second", ",.0f", ""),
    ("first token", "first_token_1024_ms", ",.0f", " ms"),
    ("perplexity", "perplexity", ".3f", ""),
    ("equal greedy tokens", "greedy_agreement", ".1%", ""),
    ("mean error", "mean_logprob_error", ".3f", ""),
    ("largest", "largest_logprob_error", ".2f", ""),
)


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of a benchmark's results by device; a sentence without any."""
    if not results:
        return "Not measured yet: `make bench-weights`."
    titles = ["class", "weights", *(title for title, *_ in _COLUMNS)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for device, result in results.items():
        rows = {row["metric"]: row for row in result["rows"] if row["value"] is not None}
        for form, words in _FORMS.items():
            found = [rows.get(f"{form}_{metric}") for _, metric, *_ in _COLUMNS]
            if any(found):
                name = f"{peer}, {words}" if (peer := _peer(rows, form)) else words
                cells = [_shown(row, *how) for row, (_, _, *how) in zip(found, _COLUMNS, strict=True)]
                lines.append(f"| {device} | {name} | {' | '.join(cells)} |")
        lines += _over_the_best(device, rows)
    return "\n".join(lines)


def _over_the_best(device: str, rows: Mapping[str, Any]) -> list[str]:
    """Return the line of ratios, none without any."""
    workloads = [re.sub("_(tokens_per_second|ms)$", "", metric) for _, metric, *_ in _COLUMNS]
    found = [rows.get(_OVER_METRIC.format(workload)) for workload in workloads]
    cells = [_shown(row, ".2f", " times") for row in found]
    return [f"| {device} | {_OVER} | {' | '.join(cells)} |"] if any(found) else []


def _peer(rows: Mapping[str, Any], form: str) -> str | None:
    """Return the name of the program, None for Quire."""
    named = (rows.get(f"{form}_{metric}") for metric in ("b1_tokens_per_second", "perplexity"))
    peer: str | None = next((row["peer"] for row in named if row), None)
    return peer


def _shown(row: Mapping[str, Any] | None, format_: str, after: str) -> str:
    return f"{row['value']:{format_}}{after}" if row else "-"
