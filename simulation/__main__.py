"""Simulate seed after seed; at a violation, print its story: `python -m simulation --seconds 60`."""

import secrets
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from simulation.campaign import Campaign, fails
from simulation.scenario import Scenario, drawn
from simulation.shrinking import shrunk
from simulation.source import source_of
from simulation.story import story_of
from simulation.tokenizer import write_tokenizer

_AT_LEAST_ONE = click.IntRange(1)


@click.command()
@click.option(
    "--seconds",
    type=click.FloatRange(0, 1e6, min_open=True),
    default=60.0,
    show_default=True,
    help="Time to simulate for; to make a failing scenario small takes a minute or two more.",
)
@click.option("--seed", type=click.IntRange(0), help="Seed of the first scenario; a random one unless given.")
@click.option("--count", type=_AT_LEAST_ONE, default=sys.maxsize, help="Most scenarios to simulate.")
@click.option("--story/--no-story", default=True, help="Whether to make a failing scenario small and print its story.")
@click.option("--lines", type=_AT_LEAST_ONE, default=150, show_default=True, help="Last lines of the story to print.")
@click.option("--whole/--shortened", default=False, help="Whether messages of the story are printed whole.")
def main(seconds: float, seed: int | None, count: int, story: bool, lines: int, whole: bool) -> None:
    """Simulate scenarios of consecutive seeds; exit with 1 at the first violation."""
    first = secrets.randbits(40) if seed is None else seed
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"first seed: {first}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizer(folder)
        campaign = Campaign(folder, first)
        _simulate(campaign, seconds, count)
        console.print(campaign.summary())
        if campaign.violation is None:
            console.print("no violation")
        else:
            console.print(f"seed {campaign.seed} violates: {campaign.violation}")
            if story:
                smallest = _made_small(drawn(campaign.seed), folder, campaign.violation.kind)
                _print_story(console, smallest, story_of(smallest, folder, whole=whole), lines)
            console.print(f"repeat with: make simulate SEED={campaign.seed}")
            sys.exit(1)


def _simulate(campaign: Campaign, seconds: float, count: int) -> None:
    """Simulate until the time or the seeds end, or until a violation."""
    end = time.monotonic() + seconds
    with _progress() as progress:
        task = progress.add_task("")
        while campaign.done < count and campaign.violation is None and (time.monotonic() < end or not campaign.done):
            campaign.run_next()
            progress.update(task, description=f"{campaign.done} seeds, {campaign.events:,} events")


def _made_small(scenario: Scenario, folder: Path, kind: str) -> Scenario:
    """Return the smallest scenario found with a violation of this kind."""
    with _progress() as progress:
        task = progress.add_task(f"making it small: {_size_of(scenario)}")
        return shrunk(
            scenario,
            lambda smaller: fails(smaller, folder, kind),
            lambda smaller: progress.update(task, description=f"making it small: {_size_of(smaller)}"),
        )


def _print_story(console: Console, scenario: Scenario, story: list[str], lines: int) -> None:
    console.print(f"{_size_of(scenario)}:\n\n{source_of(scenario)}\n")
    if len(story) > lines:
        console.print(f"... {len(story) - lines} earlier lines are left out: --lines prints more")
    for line in story[-lines:]:
        console.print(line)


def _size_of(scenario: Scenario) -> str:
    return f"requests: {len(scenario.requests)}, faults: {len(scenario.faults)}"


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    main()
