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
from simulation.scenario import drawn
from simulation.shrinking import shrunk
from simulation.story import story_of
from simulation.tokenizer import write_tokenizer

_STORY_LINES = 150


@click.command()
@click.option("--seconds", default=60.0, show_default=True, help="Time to simulate for.")
@click.option("--seed", type=int, help="Seed of the first scenario; a random one unless given.")
@click.option("--count", default=sys.maxsize, help="Most scenarios to simulate.")
@click.option("--story/--no-story", default=True, help="Whether to make a failing scenario small and tell its story.")
def main(seconds: float, seed: int | None, count: int, story: bool) -> None:
    """Simulate scenarios of consecutive seeds; exit with 1 at the first violation."""
    first = secrets.randbits(40) if seed is None else seed
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"first seed: {first}")
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        campaign = Campaign(Path(folder), first)
        _simulate(campaign, seconds, count)
        console.print(campaign.summary())
        if campaign.violation is not None:
            console.print(f"seed {campaign.seed} violates: {campaign.violation}")
            if story:
                _tell(console, Path(folder), campaign.seed)
            sys.exit(1)


def _simulate(campaign: Campaign, seconds: float, count: int) -> None:
    """Simulate until the time or the seeds end, or until a violation."""
    columns = (TextColumn("{task.description}"), TimeElapsedColumn())
    end = time.monotonic() + seconds
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("")
        while time.monotonic() < end and campaign.done < count and campaign.violation is None:
            campaign.run_next()
            progress.update(task, description=f"{campaign.done} seeds, {campaign.events:,} events")


def _tell(console: Console, folder: Path, seed: int) -> None:
    """Print the story of the smallest scenario that fails."""
    smallest = shrunk(drawn(seed), lambda scenario: fails(scenario, folder))
    story = story_of(smallest, folder)
    console.print(f"{len(smallest.requests)} requests, {len(smallest.faults)} faults: {smallest}\n")
    for line in story[-_STORY_LINES:]:
        console.print(line)
    console.print(f"repeat with: make simulate SEED={seed}")


if __name__ == "__main__":
    main()
