"""Results of a benchmark: its rows with the machine, the versions and the commit.

Needs the standard library only, so that it runs on a GPU machine with few packages. Without rich the table is plain
text; without matplotlib no picture is drawn.
"""

import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from bench.report.targets import RESULTS, ROOT, device_of, met, targets
from services.loadgen.report import machine

_PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf")
_COLUMNS = ("metric", "value", "unit", "peer", "target", "met")
_NOT_CODE = (":!bench/results", ":!docs/images")

# The import of this module is the start of a benchmark.
_STARTED = datetime.now(UTC)
_LOAD_AT_START = os.getloadavg()

Item = TypeVar("Item")


@dataclass(frozen=True)
class Row:
    """One measured figure. `peer` names its comparison; `target` is None without one."""

    metric: str
    value: float | None
    unit: str
    peer: str | None
    target: float | None
    met: bool | None


def row(benchmark: str, metric: str, value: float | None, unit: str, peer: str | None = None) -> Row:
    """Make a row, with the target that `bench/targets.toml` sets for it."""
    target = targets().get(benchmark, {}).get(metric)
    return Row(metric, value, unit, peer, target and target["target"], met(value, target))


def publish(benchmark: str, rows: list[Row], repetitions: int, folder: Path | None = None, **more: Any) -> None:
    """Print the rows as a table, write them to `bench/results/<device>/<benchmark>.json`, and draw their picture.

    `more` holds the values of every repetition. Results in another folder get no picture.
    """
    print_rows(benchmark, rows)
    write(benchmark, rows, repetitions, folder, **more)
    if folder is None:
        _draw(benchmark)


def write(benchmark: str, rows: list[Row], repetitions: int, folder: Path | None = None, **more: Any) -> None:
    """Write `<benchmark>.json` atomically."""
    result = {
        "benchmark": benchmark,
        "started": _STARTED.isoformat(timespec="seconds"),
        "load": {"start": _rounded(_LOAD_AT_START), "end": _rounded(os.getloadavg())},
        **_where(device_of(benchmark)),
        "repetitions": repetitions,
        "rows": [asdict(one) for one in rows],
        **more,
    }
    folder = folder or RESULTS / device_of(benchmark)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{benchmark}.json.unfinished"
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    unfinished.replace(folder / f"{benchmark}.json")


@cache
def _where(device: str) -> dict[str, Any]:
    """Return the machine and the versions of a benchmark."""
    return {
        "hardware": machine.hardware() | {"device": device},
        "versions": machine.versions(_PACKAGES),
        "commit": _commit(),
    }


def track(items: Iterable[Item], title: str) -> Iterator[Item]:
    """Yield items with a progress bar, if rich is installed."""
    if importlib.util.find_spec("rich") is None:
        yield from items
        return
    from rich.progress import track as with_bar

    yield from with_bar(items, title)


def print_rows(benchmark: str, rows: Sequence[Row]) -> None:
    cells = [["" if value is None else str(value) for value in asdict(one).values()] for one in rows]
    if importlib.util.find_spec("rich") is None:
        print(plain_table(benchmark, cells))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*_COLUMNS, title=benchmark)
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def plain_table(title: str, cells: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text in columns."""
    lines = [_COLUMNS, *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_COLUMNS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *shown])


def _draw(benchmark: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    from bench.report.pictures import draw

    if picture := draw(benchmark):
        print(f"drawn: {picture.relative_to(ROOT)}")


def _commit() -> str | None:
    """Return the commit; for a copy of the tree without its history, that of QUIRE_COMMIT.

    It ends with `-dirty` if other files than results and their pictures have changed.
    """
    if given := os.environ.get("QUIRE_COMMIT"):
        return given
    commit = machine.output_of(["git", "describe", "--always"], ROOT)
    changed = machine.output_of(["git", "status", "--porcelain", "--", ".", *_NOT_CODE], ROOT)
    return f"{commit}-dirty" if commit and changed else commit


def _rounded(load: tuple[float, float, float]) -> list[float]:
    return [round(one, 2) for one in load]
