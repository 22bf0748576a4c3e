"""Runs a scenario: the engine's loop, scheduler and block manager on a virtual clock."""

import gc
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from bench.papers.simulation.averages import Averages, Latencies
from bench.papers.simulation.beam_trace import recorded
from bench.papers.simulation.scenario import Scenario
from bench.papers.simulation.simulated_runner import SimulatedRunner, VirtualClock
from bench.papers.simulation.systems import build, check_fits
from engine.run.loop import Engine
from engine.schedule.outputs import Finished
from engine.schedule.scheduler import Scheduler

_BOUNDED = 512  # the latency is compared with its limit every so many steps


class Simulated(NamedTuple):
    """The results of one simulated run.

    `normalized_latency` is in seconds per token. It is a lower bound if the run was `cut`, and None without a latency
    limit. `batched` is the mean number of running requests over time. `prompt_seconds` is the time that prompts added
    to steps. Means are taken from the end of the warm-up to the last arrival; counts are of the whole run.

    `shares` has means over all steps. It is empty if the scenario has a latency limit, because only the latency is of
    interest then. Contiguous memory has shares of all slots: `tokens`, `reserved`, `internal` and `external`. Paged
    memory has the share of slots with `tokens`, and shares of all blocks: `held`; `saved`, which sharing saves; and
    `unshared`, which would be held without sharing.
    """

    normalized_latency: float | None
    cut: bool
    requests: int
    finished: int
    batched: float
    shares: Mapping[str, float]
    steps: int
    tokens: int
    preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    prompt_seconds: float
    simulated_seconds: float
    cpu_seconds: float


def simulate(**scenario: Any) -> dict[str, Any]:
    """Run a scenario; return its results as JSON values. Raises InvalidScenario, InvalidCostModel and InvalidTrace."""
    return Simulation(Scenario(**scenario)).run()._asdict()


class Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        """Draw the arrivals and build the system. Raises InvalidScenario, InvalidCostModel and InvalidTrace."""
        self._limit = scenario.latency_limit
        self._arrivals = scenario.arrivals()
        self._requests = [scenario.request(number, one) for number, one in enumerate(self._arrivals)]
        self._system = build(scenario, self._arrivals)
        check_fits(self._requests, self._system)
        self._clock = VirtualClock()
        searches = recorded(scenario.beams) if scenario.beams else None
        self._runner = SimulatedRunner(self._clock, scenario.cost_model(), searches)
        self._scheduler = Scheduler(self._system.capacity, self._system.limits)
        self._engine = Engine(self._scheduler, self._runner, self._system.blocks, self._clock)
        self._latencies = Latencies(self._arrivals)
        self._averages = Averages(scenario.warm_up * scenario.seconds, scenario.seconds)
        self._submitted = 0
        self._cut = False

    def run(self) -> Simulated:
        """Run until all requests have ended, the latency is above its limit, or (without one) the last has arrived."""
        begun = time.process_time()
        gc.disable()  # a run allocates for its whole length and frees little, so that collections only cost time
        try:
            while not self._done():
                self._turn()
        finally:
            gc.enable()
        for batch in self._system.batches:
            self._latencies.end_together([int(request_id[1:]) for request_id in batch])
        return self._result(time.process_time() - begun)

    def _done(self) -> bool:
        if self._submitted < len(self._arrivals):
            return self._cut
        return self._cut or self._limit is None or self._scheduler.empty

    def _turn(self) -> None:
        self._submit()
        begun = self._clock.now
        turn = self._engine.turn()
        if self._engine.last_failure is not None:
            raise self._engine.last_failure
        ended = [int(output.request_id[1:]) for output in turn.outputs if isinstance(output, Finished)]
        for number in ended:
            self._latencies.end(number, self._clock.now)
        if turn.step is not None:
            self._observe(begun, self._scheduler.running + len(ended))
        elif not turn.progressed and self._submitted < len(self._arrivals):
            self._clock.advance_to(self._arrivals[self._submitted].seconds)

    def _submit(self) -> None:
        while self._submitted < len(self._arrivals) and self._arrivals[self._submitted].seconds <= self._clock.now:
            self._scheduler.requests.submit(self._requests[self._submitted])
            self._submitted += 1

    def _observe(self, begun: float, running: int) -> None:
        """Add the step that ended to the averages."""
        steps, now = self._scheduler.totals.steps, self._clock.now
        if self._averages.open(now):
            self._averages.add_step(running, now - begun)
            if self._limit is None:
                self._averages.add_shares(self._system.shares(self._runner.computed))
        if self._limit is not None and steps % _BOUNDED == 0:
            self._cut = self._latencies.mean(self._submitted, now) > self._limit

    def _result(self, cpu_seconds: float) -> Simulated:
        totals = self._scheduler.totals
        latency = self._latencies.mean(self._submitted, self._clock.now)
        return Simulated(
            normalized_latency=None if self._limit is None else latency,
            cut=self._cut,
            requests=len(self._arrivals),
            finished=self._latencies.ended,
            batched=self._averages.batched,
            shares=self._averages.shares,
            steps=totals.steps,
            tokens=totals.generated_tokens,
            preemptions=totals.preemptions,
            computed_tokens=totals.computed_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            prompt_seconds=self._runner.prompt_seconds,
            simulated_seconds=self._clock.now,
            cpu_seconds=cpu_seconds,
        )
