"""The table of published formats: quality, speed and memory, from the results of `bench formats`."""

from collections.abc import Mapping
from typing import Any

# Formats by the first part of metrics' names.
_FORMATS = {
    "gptq": "GPTQ, 4 bits",
    "gptq_act_order": "GPTQ with act-order",
    "awq": "AWQ",
    "w4a16": "compressed-tensors W4A16",
    "w8a8": "compressed-tensors W8A8",
    "fp8": "FP8 in blocks, as bfloat16",
    "mxfp4": "MXFP4",
}
# Columns: a title, the metric without its format, and the format of a value.
_COLUMNS = (
    ("perplexity", "perplexity", ".3f"),
    ("difference, packed", "packed_perplexity_difference", ".3%"),
    ("difference, float32", "float32_perplexity_difference", ".4%"),
    ("1 request over GGUF", "b1_over_gguf", ".3f"),
    ("32 requests over GGUF", "b32_over_gguf", ".3f"),
    ("first token over GGUF", "first_token_1024_over_gguf", ".3f"),
)
_LOAD = "load_peak_beyond_packed_mb"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of a benchmark's results by device; a sentence without any."""
    if not results:
        return "Not measured yet: `make bench-formats`."
    titles = ["class", "weights", *(title for title, *_ in _COLUMNS)]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for device, result in results.items():
        rows = {row["metric"]: row["value"] for row in result["rows"] if row["value"] is not None}
        for form, words in _FORMATS.items():
            cells = [_shown(rows.get(f"{form}_{metric}"), shown) for _, metric, shown in _COLUMNS]
            lines.append(f"| {device} | {words} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(_load(device, result) for device, result in results.items())])


def _load(device: str, result: Mapping[str, Any]) -> str:
    found = next((row["value"] for row in result["rows"] if row["metric"] == _LOAD), None)
    size = "not measured" if found is None else f"{found:,.0f} MB"
    return f"Loading a folder with the shape of Llama 3.2 1B in 4 bits ({device}): {size} more than its packed weights."


def _shown(value: float | None, format_: str) -> str:
    return "-" if value is None else f"{value:{format_}}"
