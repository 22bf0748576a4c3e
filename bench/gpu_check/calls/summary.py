"""A call's results on one screen: failures first, then each row that has a prediction or a target."""

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.report.results import Row

MOST_LINES = 60
_WIDTH = 110
_PREDICTED = Path(__file__).with_name("predicted.toml")


def predicted() -> dict[str, str]:
    """Return what docs/benchmarking.md predicts, by metric."""
    return tomllib.loads(_PREDICTED.read_text())


def summary(rows: Sequence[Row], failures: Mapping[str, str], predictions: Mapping[str, str]) -> list[str]:
    """Return at most MOST_LINES lines. Failures get at most half of them."""
    failed = [f"FAILED {what}: {' '.join(reason.split())}"[:_WIDTH] for what, reason in failures.items()]
    shown = [_line(row, predictions.get(row.metric)) for row in _in_order(rows, predictions)]
    room = MOST_LINES - 1 - min(len(failed), MOST_LINES // 2)
    head = f"{len(rows)} rows, {len(failures)} failures; all are in the JSON"
    return [head, *_cut(failed, MOST_LINES // 2), *_cut(shown, room)]


def _in_order(rows: Iterable[Row], predictions: Mapping[str, str]) -> list[Row]:
    """Return rows that something is expected of, then the others."""
    expected = [row for row in rows if row.target is not None or row.metric in predictions]
    return [*expected, *(row for row in rows if row not in expected)]


def _cut(lines: Sequence[str], room: int) -> list[str]:
    return list(lines) if len(lines) <= room else [*lines[: room - 1], f"... and {len(lines) - room + 1} more"]


def _line(row: Row, prediction: str | None) -> str:
    value = "not measured" if row.value is None else f"{row.value:g}"
    parts = [f"{row.metric:44} {value:>12} {row.unit:9}"]
    parts += [f"predicted {prediction}"] if prediction else []
    if row.target is not None:
        parts.append(f"target {row.target:g}: {'met' if row.met else 'missed'}")
    return "  ".join(parts).rstrip()[:_WIDTH]
