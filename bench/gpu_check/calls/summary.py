"""A call's results on one screen: failures first, then each row that has a prediction or a target."""

import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from bench.gpu_check import REPETITIONS
from bench.report.results import Row, judged
from bench.report.targets import targets

MOST_LINES = 60
_WIDTH = 130
_LEAST_NAME = 28
_PREDICTED = Path(__file__).with_name("predicted.toml")
# What `tunings` adds to the names of rows.
_SUFFIXES = ("_as_committed", "_tuned")


def predicted() -> dict[str, str]:
    """Return what docs/benchmarking.md predicts, by metric."""
    return tomllib.loads(_PREDICTED.read_text())


def base_of(metric: str) -> str:
    """Return the name of the row that sets what is expected of a metric."""
    for suffix in _SUFFIXES:
        metric = metric.removesuffix(suffix)
    return metric


def judged_by_base(rows: Sequence[Row]) -> list[Row]:
    """Return rows with their verdicts; those of `tunings` have the targets of the rows that they repeat."""
    group = targets()["gpu"]
    bases = [replace(row, metric=base_of(row.metric)) for row in rows]
    aimed = [replace(row, target=group[row.metric]["target"] if row.metric in group else None) for row in bases]
    found = judged("gpu", aimed, REPETITIONS)
    return [replace(one, metric=row.metric) for one, row in zip(found, rows, strict=True)]


def summary(
    rows: Sequence[Row], failures: Mapping[str, str], predictions: Mapping[str, str], kept: Path | None = None
) -> list[str]:
    """Return at most MOST_LINES lines. Failures get at most half of them. `kept` is the file that has all."""
    failed = [textwrap.shorten(f"FAILED {what}: {why}", _WIDTH, placeholder=" ...") for what, why in failures.items()]
    shown = _lines(_in_order(rows, predictions), predictions)
    room = MOST_LINES - 1 - min(len(failed), MOST_LINES // 2)
    head = f"{len(rows)} rows, {len(failures)} failures{f'; all are in {kept}' if kept else ''}"
    return [head, *_cut(failed, MOST_LINES // 2), *_cut(shown, room)]


def _in_order(rows: Iterable[Row], predictions: Mapping[str, str]) -> list[Row]:
    """Return rows that something is expected of, then the others."""
    expected = [row for row in rows if row.target is not None or base_of(row.metric) in predictions]
    return [*expected, *(row for row in rows if row not in expected)]


def _cut(lines: Sequence[str], room: int) -> list[str]:
    return list(lines) if len(lines) <= room else [*lines[: room - 1], f"... and {len(lines) - room + 1} more"]


def _lines(rows: Sequence[Row], predictions: Mapping[str, str]) -> list[str]:
    """Return a line for each row. Names are shortened where lines would be too long."""
    rests = [_rest(row, predictions.get(base_of(row.metric))) for row in rows]
    longest = max((len(row.metric) for row in rows), default=0)
    width = min(longest, max(_LEAST_NAME, _WIDTH - 1 - max(map(len, rests), default=0)))
    return [f"{_shortened(row.metric, width):{width}} {rest}" for row, rest in zip(rows, rests, strict=True)]


def _shortened(name: str, width: int) -> str:
    """Return a name without its middle, because the ends of names differ."""
    if len(name) <= width:
        return name
    rear = (width - 3) // 2
    return f"{name[: width - 3 - rear]}...{name[-rear:]}"


def _rest(row: Row, prediction: str | None) -> str:
    value = "not measured" if row.value is None else f"{row.value:g}"
    parts = [f"{value:>12} {row.unit:9}"]
    parts += [f"predicted {prediction}"] if prediction else []
    parts += [_against_target(row)] if row.target is not None else []
    return "  ".join(parts).rstrip()


def _against_target(row: Row) -> str:
    """Return a row's target and its verdict: a value that is void or undecided has not missed it."""
    if row.value is None:
        return f"target {row.target:g}"
    return f"target {row.target:g}: {'met' if row.met else row.reason or 'missed'}"
