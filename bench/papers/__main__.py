"""Remakes the papers' figures: `make papers`, or `python -m bench.papers figures`; `simulate` runs one scenario."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.loads.memory import DATA_VARIABLE, DataMissing
from bench.papers.case import Case, Values
from bench.papers.execution import run_cases
from bench.papers.figure import Figure
from bench.papers.figures import all_figures
from bench.papers.picture import draw
from bench.papers.results import publish, summary
from bench.papers.rows import BENCHMARK, PaperRow, of_short_traces, stated, without_verdict
from bench.papers.simulation.cost_model import InvalidCostModel
from bench.papers.simulation.run import simulate as run_simulation
from bench.papers.simulation.scenario import COSTS, PREEMPTIONS, SYSTEMS, InvalidScenario, Scenario
from bench.papers.simulation.traces import InvalidTrace
from bench.papers.simulation.traces import missing as missing_files
from bench.papers.store import Store
from bench.report.targets import RESULTS, ROOT

_REFUSALS = (InvalidScenario, InvalidCostModel, InvalidTrace, DataMissing)
_WIDTH = 160  # of tables that no terminal shows
_BUILD = ROOT / "build" / "papers"


@click.group()
def main() -> None:
    """Remake the figures of the papers."""


@main.command()
@click.option("--quick", is_flag=True, help="Short traces and small measurements: minutes instead of hours.")
@click.option("--only", multiple=True, help="Name of a figure, such as figure_12; may be given several times.")
@click.option("--again", is_flag=True, help="Compute everything anew.")
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    default=os.cpu_count() or 1,
    show_default=True,
    help="Simulations at a time.",
)
@click.option("--update", is_flag=True, help="With --only: replace these figures in the results, and keep the others.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder of results, pictures and computed cases.")
def figures(quick: bool, only: Sequence[str], again: bool, workers: int, update: bool, output: Path | None) -> None:
    """Compute what is missing, and write rows and pictures. A second call goes on where the first one stopped.

    Results of a full run or an update go to bench/results and docs/images, others to build/papers.
    """
    chosen = [figure for figure in _chosen(only) if not quick or figure.cases(True) or not figure.cases(False)]
    if update:
        _check_update(output or RESULTS, quick=quick)
    folder = output or (_BUILD / "quick" if quick or (only and not update) else None)
    _check_writable(folder or _BUILD)
    store = Store((output or _BUILD) / ("quick" if quick else "full"))
    cases = list({case.name: case for figure in chosen for case in figure.cases(quick)}.values())
    _check_data(cases)
    values = {} if again else {case.name: found for case in cases if (found := store.find(case)) is not None}
    missing = [case for case in cases if case.name not in values]
    begun = time.monotonic()
    failed = _compute(missing, workers, store, values)
    complete = [figure for figure in chosen if all(case.name in values for case in figure.cases(quick))]
    rows = [row for figure in complete for row in _rows(figure, values, quick=quick)]
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    console.print(summary(rows, "papers, quick: short traces" if quick else "papers"))
    if complete == chosen:
        seconds = round(time.monotonic() - begun, 1)
        order = [figure.name for figure in all_figures()]
        publish(rows, folder, order, update=update, quick=quick, computed_cases=len(missing), seconds=seconds)
    for figure in complete:
        if figure.panels[0]:
            console.print(f"drawn: {draw(figure, values, folder)}")
    for name, failure in failed.items():
        console.print(f"[red]{name}[/red]: {type(failure).__name__}: {failure}")
    if failed:
        console.print("The same command goes on with what is missing.")
    sys.exit(bool(failed))


def _check_update(folder: Path, *, quick: bool) -> None:
    if quick:
        raise click.UsageError("--update: short traces update no results")
    if not (folder / f"{BENCHMARK}.json").exists():
        raise click.UsageError(f"--update: {folder} has no {BENCHMARK}.json")


def _check_data(cases: Sequence[Case]) -> None:
    """Refuse to begin what would fail after minutes for want of a file."""
    files = {file for case in cases for file in case.files}
    try:
        lacking = missing_files(files)
    except DataMissing as error:
        raise click.UsageError(str(error)) from error
    if lacking:
        raise click.UsageError(f"{DATA_VARIABLE}: {os.environ[DATA_VARIABLE]} has no {', '.join(lacking)}")


def _rows(figure: Figure, values: Mapping[str, Values], *, quick: bool) -> list[PaperRow]:
    """Return a figure's rows with their terms; those of a quick run have no verdict, and its capacities are marked."""
    own = {case.name: values[case.name] for case in figure.cases(quick)}
    rows = [stated(row, own) for row in figure.rows(values)]
    if not quick or not own:  # without cases it is arithmetic, which no trace makes quicker
        return rows
    unjudged = list(map(without_verdict, rows))
    return list(map(of_short_traces, unjudged)) if figure.of_capacities else unjudged


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise click.UsageError(f"--output: {folder} cannot be written: {error}") from error


def _chosen(only: Sequence[str]) -> list[Figure]:
    known = {figure.name: figure for figure in all_figures()}
    if unknown := [name for name in only if name not in known]:
        raise click.UsageError(f"no figure {unknown[0]!r}: there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(only or known)]


def _compute(cases: Sequence[Case], workers: int, store: Store, values: dict[str, Values]) -> dict[str, Exception]:
    """Run cases with a progress bar; add their values, and return the failures by name."""
    failed: dict[str, Exception] = {}
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, disable=not cases) as progress:
        task = progress.add_task("cases", total=len(cases))

        def on_end(case: Case, found: Values | Exception) -> None:
            if isinstance(found, Exception):
                failed[case.name] = found
            else:
                values[case.name] = found
                try:
                    store.put(case, found)
                except OSError as error:  # a full disk; the next run computes the case again
                    failed[case.name] = error
            progress.update(task, advance=1, description=case.name)

        run_cases(cases, workers, on_end)
    return failed


# Help and, where they are few, choices of the fields of a Scenario.
_FIELDS: dict[str, tuple[str, Sequence[str]]] = {
    "system": ("Block manager: Quire's (paged), three Orcas, or FasterTransformer.", SYSTEMS),
    "model": ("A model of coefficients.toml, such as opt-13b.", ()),
    "device": ("A device of coefficients.toml, such as a100-40g.", ()),
    "blocks": ("Blocks for K and V of all ranks; 983 of 16 tokens are the 12 GiB of OPT-13B in the paper.", ()),
    "workload": ("Lengths of requests, such as sharegpt, alpaca, chat or translation, from the folder QUIRE_DATA.", ()),
    "rate": ("Requests per second, on average.", ()),
    "ranks": ("Devices that share the model.", ()),
    "seconds": ("Duration of the arrivals.", ()),
    "samples": ("Samples of each request.", ()),
    "beams": ("Beams of each request: 2, 4 or 6, whose searches were recorded; 0 samples instead.", ()),
    "block_size": ("Tokens of a block.", ()),
    "prefix_tokens": ("Tokens of a prefix that all prompts have in common.", ()),
    "cost": ("Step times: a fit to measured steps, moved to the device by its bandwidth, or a roofline.", COSTS),
    "preemption": ("How preempted requests are brought back.", PREEMPTIONS),
    "warm_up": ("Share of the time of the arrivals that averages leave out.", ()),
    "growth_reserve": (
        "Admit as Quire does: a block for each running sequence stays free, not only the watermark of the paper.",
        (),
    ),
    "one_piece": ("Copy a swapped block in one piece, or in two pieces for each layer.", ()),
    "latency_limit": (
        "Run until all requests have ended, or the normalized latency is above this (seconds per token). Without it a "
        "run ends with the last arrival, and has no normalized latency.",
        (),
    ),
    "seed": ("Seed of arrivals and lengths.", ()),
}


_OFF = {"one_piece": "--two-per-layer", "growth_reserve": "--watermark-only"}  # the other value of a flag


def _scenario_options(command: Callable[..., None]) -> Callable[..., None]:
    kinds: dict[Any, Any] = {int: int, float: float, float | None: float}
    for field in reversed(fields(Scenario)):
        text, choices = _FIELDS[field.name]
        name = f"--{field.name.replace('_', '-')}"
        required = field.default is MISSING
        declaration = f"{name}/{_OFF[field.name]}" if field.type is bool else name
        option = click.option(
            declaration,
            type=click.Choice(choices) if choices else kinds.get(field.type),
            required=required,
            default=None if required else field.default,
            show_default=not required,
            help=text,
        )
        command = option(command)
    return command


@main.command()
@_scenario_options
def simulate(**scenario: Any) -> None:
    """Simulate one scenario, and print it with its results as JSON.

    Durations are in seconds, latencies in seconds per token, shares in parts of 1. For example:

    simulate --system paged --model opt-13b --device a100-40g --blocks 983 --workload sharegpt --rate 2
    """
    try:
        click.echo(json.dumps({"scenario": scenario, "results": run_simulation(**scenario)}, indent=2))
    except _REFUSALS as error:
        raise click.UsageError(str(error)) from error


if __name__ == "__main__":
    main()
