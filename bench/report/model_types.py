"""Tables of the model types that transformers has, from the results of `make models`: served, refused, and others."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from bench.report.targets import ROOT

MODEL_TYPES = ROOT / "docs" / "model-types.json"
# Reasons in plain words, by what the engine's message or transformers' error has; the first that fits.
_REASONS = (
    ("ALiBi", "adds biases by distance to its scores (ALiBi)"),
    ("keeps a state", "has recurrent states or convolutions, besides keys and values or instead of them"),
    ("within chunks", "attends within chunks"),
    ("is of type", "chooses which tokens each token sees, or compresses them"),
    ("per_layer_config", "has layers of different KV heads or head sizes by a field of transformers' own"),
    ("number of cached tokens", "scales its queries by the length of a cache"),
    ("sees later tokens", "sees later tokens: it is an encoder, or has a mask of its own"),
    (
        "is no window|given no window|cache has|shows .* tokens",
        "has windows that its attention or its cache does not receive",
    ),
    ("attention itself|attention interface, so", "computes its attention itself"),
    ("selects its attention by name", "chooses among attention implementations of its own"),
    ("do not pass the arguments", "does not pass the batch on to its attention"),
    ("attends more than once", "attends more than once in a layer"),
    ("custom mask", "computes a mask of its own"),
    ("position_ids", "computes positions itself"),
    ("logits_to_keep", "computes logits for all tokens"),
    ("does not run with paged attention", "has masks or inputs that depend on more than tokens and positions"),
    ("no causal language models", "has a text model that is no causal one of transformers"),
)
_PUBLISHED = "as published"


def _results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(MODEL_TYPES.read_text())
    return found


def counts() -> str:
    """Return how many types are served, refused and neither, and of which transformers."""
    results = _results()
    cases = results["cases"]
    types, equal, other = (
        {_type(one) for one in cases if one["outcome"] in outcomes or not outcomes}
        for outcomes in ((), ("equal",), ("refused",))
    )
    outcomes = Counter(one["outcome"] for one in cases).most_common()
    return (
        f"Of the {len(types)} causal model types of transformers {results['transformers']}, {len(equal)} are served, "
        f"{len(other - equal)} refused, and {len(types - equal - other)} neither. Cases, with variants: "
        f"{', '.join(f'{count} {outcome}' for outcome, count in outcomes)}."
    )


def served() -> str:
    """Return the table of types with configurations that equal transformers."""
    lines = ["| `model_type` | equal to transformers | refused |", "|---|---|---|"]
    for model_type, cases in _by_type().items():
        equal, other = (_variants(cases, outcome) for outcome in ("equal", "refused"))
        if equal:
            lines.append(f"| `{model_type}` | {equal} | {other} |")
    return "\n".join(lines)


def refused() -> str:
    """Return the table of reasons, each with its types and the first message."""
    lines = ["| the model | types | message, for example |", "|---|---|---|"]
    return "\n".join(lines + [f"| {words} | {types} | {message} |" for words, types, message in _rows()])


def others() -> str:
    """Return the table of cases that are neither equal nor refused."""
    lines = ["| outcome | types | reason |", "|---|---|---|"]
    for outcome in ("wrong", "crash", "too long", "not buildable"):
        lines += [f"| {outcome} | {types} | {message} |" for _, types, message in _rows(outcome, _cell)]
    return "\n".join(lines)


def plain_reason(message: str) -> str:
    """Return a message's reason in plain words; an unknown one stays as it is."""
    return next((words for pattern, words in _REASONS if re.search(pattern, message)), _cell(message))


def _rows(outcome: str = "refused", group_of: Callable[[str], str] = plain_reason) -> Iterator[tuple[str, str, str]]:
    """Yield each group of an outcome's reasons, with its types and its first reason; the largest first."""
    groups: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in _results()["cases"]:
        if one["outcome"] == outcome:
            groups[group_of(one["reason"])].append(one)
    for words, cases in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
        yield words, _named(cases), _cell(cases[0]["reason"])


def _named(cases: Iterable[Mapping[str, Any]]) -> str:
    """Return the types of cases, each with its variants."""
    names = []
    for model_type, of_type in _grouped_by_type(cases).items():
        variants = [name for one in of_type if (name := _variant(one)) != _PUBLISHED]
        whole = len(variants) < len(of_type)
        names.append(f"`{model_type}`" if whole else f"`{model_type}` ({'; '.join(variants)})")
    return ", ".join(names)


def _variants(cases: Iterable[Mapping[str, Any]], outcome: str) -> str:
    return "; ".join(_variant(one) for one in cases if one["outcome"] == outcome)


def _by_type() -> dict[str, list[Mapping[str, Any]]]:
    return _grouped_by_type(_results()["cases"])


def _grouped_by_type(cases: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in cases:
        found[_type(one)].append(one)
    return dict(sorted(found.items()))


def _type(case: Mapping[str, Any]) -> str:
    name: str = case["case"]
    return name.partition(":")[0]


def _variant(case: Mapping[str, Any]) -> str:
    return case["case"].partition(": ")[2] or _PUBLISHED


def _cell(text: str) -> str:
    """Return a text for a cell of a table, shortened, without the name of the engine's own attention."""
    plain = re.sub(r"[|`<>]", " ", text.partition(" and has none named")[0])
    return plain if len(plain) <= 140 else plain[:139].rstrip() + "…"
