"""Simulates seed after seed: `python -m simulation --seconds 60`. At a violation, prints its story and exits with 1."""

import argparse
import gc
import logging
import secrets
import sys
import tempfile
import time
from pathlib import Path

from simulation.scenario import Scenario, drawn
from simulation.shrinking import shrunk
from simulation.simulation import Simulation, Violation
from tests.tiny_models import write_tokenizer

_STORY_LINES = 60


def main() -> int:
    """Simulate; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="of the first scenario; a random one unless given")
    parser.add_argument("--count", type=int, default=sys.maxsize, help="of seeds, at most")
    options = parser.parse_args()
    seed = secrets.randbits(40) if options.seed is None else options.seed
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None  # coroutines of killed processes
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return _simulate(Path(folder), seed, options.seconds, options.count)


def _simulate(folder: Path, seed: int, seconds: float, count: int) -> int:
    begun, events, kills, done = time.monotonic(), 0, 0, 0
    while done < count and time.monotonic() - begun < seconds:
        scenario = drawn(seed + done)
        simulation = Simulation(scenario, folder)
        try:
            simulation.run()
        except Violation as violation:
            print(f"seed {seed + done}: {violation}")
            _tell(folder, scenario)
            return 1
        events += simulation.universe.events
        kills += sum(one.kind.startswith("kill") for one in scenario.faults)
        done += 1
        del simulation
        gc.unfreeze()
        gc.collect()
    minutes = (time.monotonic() - begun) / 60
    print(f"seeds {seed} to {seed + done - 1}: no violation in {events} events ({events / minutes:.0f} a minute), ")
    print(f"{kills} kills ({kills / minutes:.0f} a minute)")
    return 0


def _tell(folder: Path, scenario: Scenario) -> None:
    """Print the story of the smallest scenario that fails."""

    def fails(smaller: Scenario) -> bool:
        try:
            Simulation(smaller, folder).run()
        except Violation:
            return True
        return False

    smallest = shrunk(scenario, fails)
    simulation = Simulation(smallest, folder)
    try:
        simulation.run()
    except Violation as violation:
        print(f"the shortest scenario: {smallest}")
        for event in simulation.universe.story[-_STORY_LINES:]:
            print(f"{event.at - simulation.begun:10.6f}  {event.process:10}  {event.words}")
        print(f"violation: {violation}")


if __name__ == "__main__":
    sys.exit(main())
