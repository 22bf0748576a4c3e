"""Writes `bench/results/papers.json`, and shows the largest deviations from the papers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from bench.papers.rows import BENCHMARK, PaperRow
from bench.report.results import write
from bench.report.targets import RESULTS

LARGE_DEVIATION = 0.1  # above which docs/papers.md explains a row


def publish(rows: Sequence[PaperRow], folder: Path | None, **more: Any) -> None:
    """Write `papers.json` into a folder, by default that of all devices: simulations do not depend on the device."""
    write(BENCHMARK, list(rows), 1, folder or RESULTS, **more)


def read(folder: Path = RESULTS) -> dict[str, Any]:
    """Return the latest results. Raises FileNotFoundError if there are none."""
    results: dict[str, Any] = json.loads((folder / f"{BENCHMARK}.json").read_text())
    return results


def summary(rows: Sequence[PaperRow], title: str) -> Table:
    """Return the rows that have a value in a paper, or a target, as a table."""
    table = Table(Column("metric", no_wrap=True), "ours", "paper", "deviation", "kind", "target", "met", title=title)
    for row in rows:
        if row.paper is None and row.target is None:
            continue
        cells = asdict(row)
        deviation = "" if row.deviation is None else f"{row.deviation:+.1%}"
        shown = [cells["metric"], _text(row.value), _text(row.paper), deviation, row.kind, _text(row.target)]
        table.add_row(*shown, "" if row.met is None else str(row.met))
    return table


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
