"""Simulations of consecutive seeds, with counts of what happened."""

import gc
import tempfile
import time
from pathlib import Path

from simulation.invariants.violation import Violation
from simulation.scenario import Scenario, drawn
from simulation.simulation import Simulation, violation_of
from simulation.tokenizer import write_tokenizer

# A full collection takes as long as a scenario.
_COLLECT_EVERY = 50


class Campaign:
    """Simulates the scenarios of the seeds from `first_seed` on. `folder` has the tokenizer of the simulated model."""

    def __init__(self, folder: Path, first_seed: int) -> None:
        self._folder = folder
        self._begun = time.monotonic()
        self.first_seed = first_seed
        self.done = 0
        self.events = 0
        self.kills = 0
        self.flips = 0
        self.condemned = 0
        self.violation: Violation | None = None  # of the latest scenario

    @property
    def seed(self) -> int:
        """The seed of the latest scenario."""
        return self.first_seed + self.done - 1

    def run_next(self) -> None:
        """Simulate the next seed."""
        if self.done % _COLLECT_EVERY == 0:
            gc.unfreeze()  # the product freezes what it builds while an engine attaches
            gc.collect()
        self.done += 1
        simulation = Simulation(drawn(self.seed), self._folder)
        self.violation = violation_of(simulation)
        self.events += simulation.universe.events
        self.kills += simulation.kills
        self.flips += simulation.flips.count
        self.condemned += simulation.condemned

    def summary(self) -> str:
        """Return what was simulated, and how fast."""
        minutes = (time.monotonic() - self._begun) / 60
        return (
            f"{self.done} scenarios, {self.events:,} events ({self.events / minutes:,.0f} a minute), "
            f"{self.kills:,} kills ({self.kills / minutes:,.0f} a minute), "
            f"{self.flips:,} flipped bits, {self.condemned:,} blocks condemned"
        )


def simulate(scenario: Scenario) -> None:
    """Simulate a scenario, for a debugger. Raises Violation."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        Simulation(scenario, Path(folder)).run()


def fails(scenario: Scenario, folder: Path, kind: str | None = None) -> bool:
    """Return whether a scenario has a violation, of this kind if one is given."""
    violation = violation_of(Simulation(scenario, folder))
    return violation is not None and kind in (None, violation.kind)
