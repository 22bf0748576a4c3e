"""The table of what Quire and vLLM read differently."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from bench.dialects.explanation import Explanation
from bench.dialects.explanations import EXPLANATIONS

# Metrics of the benchmark.
EQUAL, EXPLAINED, UNEXPLAINED = "texts_read_alike", "explained_differences", "unexplained_differences"
WORSE = "better_read_by_vllm"


def table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the counts of the newest results, and all explanations with the number of texts that have each."""
    newest: Mapping[str, Any] = max(results.values(), key=lambda one: str(one["started"]), default={})
    texts = Counter(name for line in newest.get("differences", ()) for name in line["explanations"])
    lines = ["| texts | kind | vLLM | Quire, and why | dialects |", "|---|---|---|---|---|"]
    ordered = sorted(EXPLANATIONS, key=lambda one: (not one.worse, -texts[one.name]))
    return "\n".join(
        [_counts(newest), "", *lines, *(_line(one, texts[one.name] if newest else "-") for one in ordered)]
    )


def _counts(result: Mapping[str, Any]) -> str:
    found = {row["metric"]: row for row in result.get("rows", ())}
    if not found or found[EQUAL]["value"] is None:
        return "Not measured yet: `make bench-dialects`."
    counts = {metric: f"{row['value']:.0f}" for metric, row in found.items()}
    return (
        f"Of {counts['texts']} texts, Quire and {found[EQUAL]['peer']} read {counts[EQUAL]} alike;"
        f" {counts[EXPLAINED]} differ as explained below, some in two ways, and {counts[UNEXPLAINED]} otherwise."
        f" In {counts[WORSE]} texts vLLM's reading is the better one (the bold lines)."
    )


def _line(one: Explanation, texts: int | str) -> str:
    name = f"**{one.name}**" if one.worse else one.name
    dialects = ", ".join(f"`{dialect}`" for dialect in one.dialects)
    return f"| {texts} | {name}: {', '.join(one.kinds)} | {one.vllm} | {one.quire}; {one.why} | {dialects} |"
