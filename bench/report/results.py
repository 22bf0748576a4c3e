"""Results of a benchmark: its rows with the machine, the versions and the commit.

Needs only the standard library, because GPU machines may have few packages. The table is plain text where rich is not
installed or the output is a file. Without matplotlib no picture is drawn.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from bench.report.foreign_cpu import ForeignCpu
from bench.report.staleness import PRODUCT
from bench.report.targets import RESULTS, ROOT, device_of, targets
from bench.report.terms import Terms, check_equal
from bench.report.verdict import Interval, Run, verdict
from services.loadgen.report import machine

_PACKAGES = ("torch", "triton", "transformers", "grpcio", "protobuf")
_COLUMNS = ("metric", "value", "unit", "peer", "target", "met", "reason")
_NOT_CODE = (":!bench/results", ":!docs/images")

# The import of this module is the start of a benchmark.
_STARTED = datetime.now(UTC)
_LOAD_AT_START = os.getloadavg()
_FOREIGN_CPU = ForeignCpu()

Item = TypeVar("Item")


@dataclass(frozen=True)
class Row:
    """A measured value, the target that it was compared with, and whether it meets that target.

    `peer` is the program or limit on the other side of a ratio. `target` and `met` are None if no target is set.
    `reason` says why a value that reaches its target still does not meet it. `terms` has the terms of each program.
    `null` is the interval of this figure when both sides run the same program. `by` says how a goal was met. `limit`
    marks a share of a physical limit, `exact` a value that every run repeats. `code` has the paths of the measured
    code; if it is empty, those of the whole run apply.
    """

    metric: str
    value: float | None
    unit: str
    peer: str | None
    target: float | None
    met: bool | None
    reason: str | None = field(default=None, kw_only=True)
    terms: Mapping[str, Terms] = field(default_factory=dict, kw_only=True)
    null: Interval | None = field(default=None, kw_only=True)
    by: str | None = field(default=None, kw_only=True)
    limit: bool = field(default=False, kw_only=True)
    exact: bool = field(default=False, kw_only=True)
    code: Sequence[str] = field(default=(), kw_only=True)


def row(
    benchmark: str,
    metric: str,
    value: float | None,
    unit: str,
    peer: str | None = None,
    *,
    terms: Mapping[str, Terms] | None = None,
    null: Interval | None = None,
    by: str | None = None,
    limit: bool = False,
    exact: bool = False,
) -> Row:
    """Make a row, with its target from `bench/targets.toml`. `terms` maps each program to its terms.

    Raises UnequalTerms if the terms of the programs differ and the name of the metric does not say so.
    """
    check_equal(metric, terms or {})
    target = targets().get(benchmark, {}).get(metric)
    made = Row(
        metric,
        value,
        unit,
        peer,
        target and target["target"],
        None,
        terms=terms or {},
        null=null,
        by=by,
        limit=limit,
        exact=exact,
    )
    return _judged(made, target, Run(commit="not written yet"))


def _judged(one: Row, target: Mapping[str, Any] | None, run: Run) -> Row:
    found = verdict(one.value, target, run, null=one.null, limit=one.limit, exact=one.exact)
    return replace(one, met=found.met, reason=found.reason)


def publish(
    benchmark: str,
    rows: Sequence[Row],
    repetitions: int,
    folder: Path | None = None,
    code: Sequence[str] = PRODUCT,
    **more: Any,
) -> None:
    """Print the rows as a table, write them to `bench/results/<device>/<benchmark>.json`, and draw their picture.

    `code` has the paths of the measured code, `more` the values of every repetition. No picture is drawn if `folder` is
    given.
    """
    print_rows(benchmark, judged(benchmark, rows, repetitions))
    write(benchmark, rows, repetitions, folder, code, **more)
    if folder is None:
        _draw(benchmark)


def judged(benchmark: str, rows: Iterable[Row], repetitions: int, *, dry: bool = False) -> list[Row]:
    """Return the rows with their verdicts, which depend on the conditions of this run too. A dry run has no commit."""
    run = Run(None if dry else _where(device_of(benchmark))["commit"], repetitions, _FOREIGN_CPU.most)
    group = targets().get(benchmark, {})
    return [_judged(one, group.get(one.metric), run) for one in rows]


def write(
    benchmark: str,
    rows: Sequence[Row],
    repetitions: int,
    folder: Path | None = None,
    code: Sequence[str] = PRODUCT,
    *,
    dry: bool = False,
    **more: Any,
) -> None:
    """Write `<benchmark>.json` atomically. Each row has the commit and the code that it measured.

    The results of a `dry` run say so and have no commit, so that no row counts.
    """
    where = _where(device_of(benchmark)) | ({"commit": None} if dry else {})
    commit = where["commit"]
    result = {
        "benchmark": benchmark,
        "started": _STARTED.isoformat(timespec="seconds"),
        "load": {"start": _rounded(_LOAD_AT_START), "end": _rounded(os.getloadavg())},
        "foreign_cores": _FOREIGN_CPU.most,
        **where,
        "repetitions": repetitions,
        "rows": [
            asdict(one) | {"commit": commit, "code": list(one.code or code)}
            for one in judged(benchmark, rows, repetitions, dry=dry)
        ],
        **({"dry": True} if dry else {}),
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
        "commit": commit_of_tree(),
    }


def track(items: Iterable[Item], title: str) -> Iterator[Item]:
    """Yield items with a progress bar, if rich is installed."""
    if importlib.util.find_spec("rich") is None:
        yield from items
        return
    from rich.progress import track as with_bar

    yield from with_bar(items, title)


def repeated(count: int, title: str, *, warm_up: bool = True) -> Iterator[int]:
    """Yield the number of each repetition: 0 for the warm-up, then 1 to `count`. Shows a progress bar.

    Records the CPU time of other processes during each repetition but the warm-up, because it can void the results.
    """
    for number in track(range(0 if warm_up else 1, count + 1), title):
        with _FOREIGN_CPU.watched() if number else nullcontext():
            yield number


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Return the order of the programs in repetition `number`, such that no program has an advantage by its place.

    Each repetition starts with the next program. After one round of all programs the order is reversed for a round.
    """
    begin = number % len(names)
    turned = [*names[begin:], *names[:begin]]
    return turned[::-1] if number // len(names) % 2 else turned


def print_rows(benchmark: str, rows: Sequence[Row]) -> None:
    """Print a table of the rows, and below it how each goal was reached."""
    _print_table(benchmark, rows)
    for one in rows:
        if one.by:
            print(f"{one.metric}: {one.by}")


def _print_table(benchmark: str, rows: Sequence[Row]) -> None:
    cells = [[_shown(getattr(one, column)) for column in _COLUMNS] for one in rows]
    if importlib.util.find_spec("rich") is None or not sys.stdout.isatty():  # a file has no width to fit
        print(plain_table(benchmark, cells))
        return
    from rich.console import Console
    from rich.table import Column, Table

    metric, *others = _COLUMNS
    table = Table(Column(metric, no_wrap=True), *others, title=benchmark)
    for line in cells:
        table.add_row(*line)
    Console().print(table)


def plain_table(title: str, cells: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text in columns."""
    lines = [_COLUMNS, *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(_COLUMNS))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([title, *shown])


def _shown(value: object) -> str:
    return "" if value is None else str(value)


def _draw(benchmark: str) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        return
    from bench.report.pictures import draw

    if picture := draw(benchmark):
        print(f"drawn: {picture.relative_to(ROOT)}")


def commit_of_tree() -> str | None:
    """Return the current commit, or QUIRE_COMMIT where it is set: a copied tree may have no history.

    `-dirty` is appended if files other than results and their pictures have changed.
    """
    if given := os.environ.get("QUIRE_COMMIT"):
        return given
    commit = machine.output_of(["git", "describe", "--always"], ROOT)
    changed = machine.output_of(["git", "status", "--porcelain", "--", ".", *_NOT_CODE], ROOT)
    return f"{commit}-dirty" if commit and changed else commit


def _rounded(load: tuple[float, float, float]) -> list[float]:
    return [round(one, 2) for one in load]
