"""The simulator on one core: events and kills a minute, and how many events pass without a violation.

Seeds are taken one after the other until ten million events have happened. Timers are not counted.
"""

import os
import secrets
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from bench.report.results import publish, repeated, row
from simulation.campaign import Campaign
from simulation.tokenizer import write_tokenizer

CODE = ("blocks", "kvmanager", "engine", "services", "simulation", "bench/blocks/simulation.py")
REPETITIONS = 5
EVENTS = 10_000_000  # of all repetitions
# So many events for a short run.
EVENTS_VARIABLE = "QUIRE_SIMULATED_EVENTS"


class Rates(NamedTuple):
    """Events and kills a minute."""

    events: float
    kills: float


def main() -> None:
    """Simulate, and publish the rates."""
    torch.set_num_threads(1)
    first, events = secrets.randbits(40), int(os.environ.get(EVENTS_VARIABLE, EVENTS))
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        campaign = Campaign(Path(folder), first)
        repetitions = repeated(REPETITIONS, "simulation", warm_up=False)
        rates = [measure(campaign, events // REPETITIONS) for _ in repetitions]
    found = campaign.violation
    rows = [
        row("simulation", "events_a_minute", round(median(rate.events for rate in rates)), "events"),
        row("simulation", "kills_a_minute", round(median(rate.kills for rate in rates)), "kills"),
        row("simulation", "events_without_violation", None if found else campaign.events, "events"),
    ]
    found_by = {"first_seed": first, "scenarios": campaign.done, "violation": str(found or "")}
    publish("simulation", rows, REPETITIONS, code=CODE, found_by=found_by, rates=rates)


def measure(campaign: Campaign, events: int) -> Rates:
    """Simulate some more events; return the rates meanwhile."""
    begun, events_before, kills_before = time.perf_counter(), campaign.events, campaign.kills
    while campaign.events < events_before + events and campaign.violation is None:
        campaign.run_next()
    minutes = (time.perf_counter() - begun) / 60
    return Rates((campaign.events - events_before) / minutes, (campaign.kills - kills_before) / minutes)


if __name__ == "__main__":
    main()
