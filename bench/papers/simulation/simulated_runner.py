"""Executes plans on a virtual clock: a step takes the time of a cost model, and nothing is computed.

Sampled tokens are the index of their sample, because equal tokens of samples would be shared after a preemption. A beam
is continued by those that continued it in a recorded search of a real model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from bench.papers.simulation.beam_trace import RecordedSearches
from bench.papers.simulation.cost_model import CostModel, StepLoad
from engine.schedule.step_plan import Sampled, StepPlan, Work

_MULTIPLIER = 0x9E3779B97F4A7C15  # of Fibonacci hashing
FIRST_NODE = 50_000  # token id of the first node of recorded searches
_NEVER = -1e6  # log-probability of a continuation that is pruned


class VirtualClock:
    """Seconds since the start of a simulation. Called, it returns them."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now

    def advance_to(self, time: float) -> None:
        """Advance to a time; earlier ones change nothing."""
        self.now = max(self.now, time)


@dataclass(frozen=True)
class SimulatedStep:
    """A launched step. `result` advances the clock to its end."""

    clock: VirtualClock
    end: float
    results: list[Sampled]

    def result(self) -> list[Sampled]:
        """Return the results, at the end of the step."""
        self.clock.advance_to(self.end)
        return self.results

    def sample_seconds(self) -> float:
        """Return 0: the cost model does not separate sampling."""
        return 0.0


class SimulatedRunner:
    """A `Runner` whose steps run one behind the other."""

    def __init__(self, clock: VirtualClock, cost: CostModel, searches: RecordedSearches | None = None) -> None:
        """Start idle. `searches` are needed for beam searches only.

        `computed` has the number of computed tokens of each sequence in the latest step, `prompt_seconds` what prompts
        added to the duration of all steps.
        """
        self.computed: dict[int, int] = {}
        self.prompt_seconds = 0.0
        self._clock = clock
        self._cost = cost
        self._searches = searches
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> SimulatedStep:
        """Launch a step behind all steps launched before."""
        begin = max(self._clock.now, self._free_at)
        load = load_of(plan)
        seconds = self._cost.seconds(load)
        if load.prompt_tokens:
            self.prompt_seconds += seconds - self._cost.seconds(load._replace(prompt_tokens=0, prompt_squares=0))
        self._free_at = begin + seconds
        self.computed = {work.sequence: work.end for work in plan.work}
        return SimulatedStep(self._clock, self._free_at, list(chain.from_iterable(map(self._results, plan.work))))

    def _results(self, work: Work) -> Sequence[Sampled]:
        if not work.samples:
            return ()
        if work.candidates:
            return (Sampled(0, top=self._continuations(work)),)
        return [Sampled(index) for index in work.sample_indices]

    def _continuations(self, work: Work) -> tuple[tuple[int, float], ...]:
        """Return the nodes that continue a beam, and others that no search keeps. Behind a prompt a search begins."""
        assert self._searches, "beam searches need recorded ones"
        node = work.token_ids[-1] - FIRST_NODE
        searches = self._searches
        nodes = searches.first(work.sequence * _MULTIPLIER >> 11) if node < 0 else searches.children(node)
        kept = [(FIRST_NODE + one, 0.0) for one in nodes]
        others = [(rank, _NEVER - rank) for rank in range(work.candidates - len(kept))]
        return (*kept, *others)


def load_of(plan: StepPlan) -> StepLoad:
    """Return what a step computes and copies. A part of a prompt that has one token counts as decoding."""
    decoding = context = prompt_tokens = squares = 0
    for work in plan.work:
        tokens = len(work.token_ids)
        if tokens == 1:
            decoding += 1
            context += work.start + 1
        else:
            prompt_tokens += tokens
            squares += work.end**2 - work.start**2
    copied = sum(len(copies.device_to_device) for copies in plan.copies)
    swapped = sum(len(copies.device_to_host) + len(copies.host_to_device) for copies in plan.copies)
    return StepLoad(decoding, context, prompt_tokens, squares, copied, swapped)
