"""Many simulations, one after the other, with counts of what happened."""

import gc
import time
from pathlib import Path

from simulation.invariants.violation import Violation
from simulation.scenario import Scenario
from simulation.simulation import Simulation

# A full collection takes as long as a scenario.
_COLLECT_EVERY = 50


class Campaign:
    """Runs scenarios. `folder` has the tokenizer of the simulated model."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun = time.monotonic()
        self.done = 0
        self.events = 0
        self.kills = 0

    def run(self, scenario: Scenario) -> Violation | None:
        """Run a scenario; return its violation, if any."""
        if self.done % _COLLECT_EVERY == 0:
            gc.unfreeze()  # the product freezes what it builds while an engine attaches
            gc.collect()
        simulation = Simulation(scenario, self._folder)
        try:
            simulation.run()
        except Violation as violation:
            return violation
        finally:
            self.done += 1
            self.events += simulation.universe.events
            self.kills += simulation.kills
        return None

    def summary(self) -> str:
        """Return what was simulated, and how fast."""
        minutes = (time.monotonic() - self._begun) / 60
        return (
            f"{self.done} scenarios, {self.events:,} events ({self.events / minutes:,.0f} a minute), "
            f"{self.kills:,} kills ({self.kills / minutes:,.0f} a minute)"
        )
