"""The story of a scenario: what happened in the order of time, for people."""

from pathlib import Path

from simulation.invariants.violation import Violation
from simulation.scenario import Scenario
from simulation.simulation import Simulation


def story_of(scenario: Scenario, folder: Path) -> list[str]:
    """Run a scenario again, and return its events as lines; the last one is its violation, if any."""
    simulation = Simulation(scenario, folder)
    violation = None
    try:
        simulation.run()
    except Violation as found:
        violation = found
    lines = [f"{event.at:10.6f}  {event.process:10}  {event.words}" for event in simulation.universe.story]
    return [*lines, f"violation: {violation}"] if violation else lines
