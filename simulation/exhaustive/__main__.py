"""Find all states of the small universe: `python -m simulation.exhaustive --faults 1 --depth 18`."""

import sys
from dataclasses import asdict

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from simulation.exhaustive.search import Counts, Search
from simulation.exhaustive.small_engine import requests_of
from simulation.exhaustive.state import Bounds
from simulation.invariants.violation import Violation


@click.command()
@click.option("--depth", type=click.IntRange(1), default=1000, show_default=True, help="Most choices on a path.")
@click.option("--faults", type=click.IntRange(0), default=0, show_default=True, help="Most faults on a path.")
@click.option("--timers", type=click.IntRange(0), default=4, show_default=True, help="Most timers that end on a path.")
@click.option("--tokens", type=click.IntRange(1), default=1, show_default=True, help="Tokens of each answer.")
@click.option("--incarnations", type=click.IntRange(1, 2), default=2, show_default=True, help="Starts of the engine.")
def main(depth: int, faults: int, timers: int, tokens: int, incarnations: int) -> None:
    """Find all states; exit with 1 at the first violation, and print the shortest path to it."""
    console = Console(highlight=False, soft_wrap=True)
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        search = Search(
            Bounds(faults, timers, incarnations),
            requests_of(tokens),
            lambda counts: progress.update(task, description=_brief(counts)),
        )
        violation = _violation(search, depth)
    if violation is not None:
        console.print(str(violation))
    elif search.counts.unexpanded:
        console.print(f"not complete: {search.counts.unexpanded:,} states at depth {depth} lead to more")
    else:
        console.print("complete: all orders within the bounds")
    console.print(", ".join(f"{name} {round(value, 1):,}" for name, value in asdict(search.counts).items()))
    sys.exit(violation is not None)


def _violation(search: Search, depth: int) -> Violation | None:
    try:
        search.run(depth)
    except Violation as violation:
        return violation
    return None


def _brief(counts: Counts) -> str:
    return f"depth {counts.depth}, {counts.states:,} states, {counts.edges:,} edges"


if __name__ == "__main__":
    main()
