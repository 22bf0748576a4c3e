"""Rows of `bench/results/papers.json`: our value of a figure, and the paper's."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from bench.papers.case import Values
from bench.report.results import Row, row
from bench.report.terms import Terms, check_equal

BENCHMARK = "papers"
# What values depend on: those of cases that are timed, and of others, which no kernel can change.
MEASURED_CODE = ("blocks", "engine", "kvmanager", "bench/engine", "bench/loads", "bench/papers/measured")
SIMULATED_CODE = (
    "blocks",
    "kvmanager",
    "engine/run/loop.py",
    "engine/schedule",
    "bench/papers/baselines",
    "bench/papers/simulation",
)
_PAPER_VALUES = Path(__file__).with_name("paper_values.toml")


class Kind(StrEnum):
    """How a value came about: by a clock, by the simulated runner, or by arithmetic and the real core alone."""

    MEASURED = "measured"
    SIMULATED = "simulated"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class PaperRow(Row):
    """A row with its figure, the paper's value, and the relative deviation from it, None if the paper has no value."""

    figure: str
    kind: Kind
    paper: float | None
    deviation: float | None


def paper_row(figure: str, metric: str, value: float | None, unit: str, kind: Kind) -> PaperRow:
    """Make the row `<figure>_<metric>`, with the paper's value of `paper_values.toml` and the target, if there are."""
    name = f"{figure}_{metric}"
    base = row(BENCHMARK, name, value, unit, "paper")
    paper = paper_value(figure, metric)
    deviation = None if value is None or not paper else round(value / paper - 1, 4)
    return PaperRow(
        *(name, value, unit, None if paper is None else "paper", base.target, base.met, figure, kind, paper, deviation),
        exact=kind is not Kind.MEASURED,
        code=MEASURED_CODE if kind is Kind.MEASURED else SIMULATED_CODE,
    )


def stated(row: PaperRow, values: Mapping[str, Values]) -> PaperRow:
    """Return a row with the terms of what it compares. `values` are those of its figure's cases.

    A measured row has the terms of the case whose name its own begins with, or else of all that differ. Raises
    UnequalTerms if they differ in something that the row's name does not state.
    """
    if row.kind is not Kind.MEASURED:
        return replace(row, terms={row.kind.value: Terms(work=row.figure, start="cold")})
    of_cases = {name: Terms(**case["terms"]) for name, case in values.items() if "terms" in case}
    own = {name: terms for name, terms in of_cases.items() if row.metric.startswith(f"{name}_")} or of_cases
    distinct = {terms: name for name, terms in reversed(own.items())}
    found = {name: terms for terms, name in reversed(distinct.items())}
    check_equal(row.metric, found)
    return replace(row, terms=found)


def without_verdict(row: PaperRow) -> PaperRow:
    """Return the row of a quick run: on short traces and small measurements no target can be met or missed."""
    return replace(row, target=None, met=None, reason=None)


def of_short_traces(row: PaperRow) -> PaperRow:
    """Return the row of a quick run, whose name says that it is no capacity: queues have no time to grow."""
    mark = "too_high" if row.unit == "requests/s" else "of_short_traces"
    return replace(row, metric=f"{row.metric}_{mark}")


def paper_value(figure: str, metric: str) -> float | None:
    """Return the paper's value, None if it has none."""
    value: float | None = _paper_values().get(figure, {}).get(metric)
    return value


@cache
def _paper_values() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_PAPER_VALUES.read_text())
