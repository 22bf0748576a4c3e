"""Rows of `bench/results/papers.json`: our value of a figure, and the paper's."""

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from bench.report.results import Row, row

BENCHMARK = "papers"
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
    )


def paper_value(figure: str, metric: str) -> float | None:
    """Return the paper's value, None if it has none."""
    value: float | None = _paper_values().get(figure, {}).get(metric)
    return value


@cache
def _paper_values() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_PAPER_VALUES.read_text())
