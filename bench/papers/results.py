"""Writes `bench/results/papers.json`, and shows the largest deviations from the papers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from bench.papers.rows import BENCHMARK, PaperRow
from bench.report.results import write
from bench.report.targets import RESULTS

LARGE_DEVIATION = 0.1  # above which docs/papers.md explains a row


def publish(
    rows: Sequence[PaperRow], folder: Path | None, order: Sequence[str] = (), *, update: bool = False, **more: Any
) -> None:
    """Write `papers.json` into a folder, by default that of all devices: simulations do not depend on the device.

    An `update` keeps the rows of other figures, with the commit, the day and the CPU that they are from. `order` has
    the names of all figures.
    """
    folder = folder or RESULTS
    before = read(folder) if update else None
    write(BENCHMARK, list(rows), 1, folder, **more)
    if before is not None:
        path = folder / f"{BENCHMARK}.json"
        written = json.loads(path.read_text())
        path.write_text(json.dumps(_merged(before, written, order), indent=2) + "\n")


def _merged(before: Mapping[str, Any], written: dict[str, Any], order: Sequence[str]) -> dict[str, Any]:
    """Return the written results with the rows of the figures that only the earlier ones have."""
    figures = {row["figure"] for row in written["rows"]}
    origin = {"commit": before["commit"], "cpu": before["hardware"]["cpu"], "day": before["started"][:10]}
    kept = [{**origin, **row} for row in before["rows"] if row["figure"] not in figures and row["figure"] in order]
    rows = sorted([*written["rows"], *kept], key=lambda row: order.index(row["figure"]))
    return {**written, "rows": rows}


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
