"""Executes plans on a virtual clock: a step takes the time of a cost model, and nothing is computed.

Sampled tokens are the index of their sample, because equal tokens of samples would be shared after a preemption. A beam
gets recorded log-probabilities of a real model, drawn by its sequence and position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from bench.papers.simulation.cost_model import CostModel, StepLoad
from engine.schedule.step_plan import Sampled, StepPlan, Work

# Log-probabilities of the most likely tokens at one position, most likely first.
Candidates = Sequence[float]
_MULTIPLIER = 0x9E3779B97F4A7C15  # of Fibonacci hashing


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

    def __init__(self, clock: VirtualClock, cost: CostModel, candidates: Sequence[Candidates] = ()) -> None:
        """Start idle. `candidates` are needed for beam searches only.

        `computed` has the number of computed tokens of each sequence in the latest step.
        """
        self.computed: dict[int, int] = {}
        self._clock = clock
        self._cost = cost
        self._candidates = candidates
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> SimulatedStep:
        """Launch a step behind all steps launched before."""
        begin = max(self._clock.now, self._free_at)
        self._free_at = begin + self._cost.seconds(load_of(plan))
        self.computed = {work.sequence: work.end for work in plan.work}
        return SimulatedStep(self._clock, self._free_at, list(chain.from_iterable(map(self._results, plan.work))))

    def _results(self, work: Work) -> Sequence[Sampled]:
        if not work.samples:
            return ()
        if work.candidates:
            return (Sampled(0, top=self._continuations(work)),)
        return [Sampled(index) for index in work.sample_indices]

    def _continuations(self, work: Work) -> tuple[tuple[int, float], ...]:
        """Return a recorded row of candidates; each token id is its rank, so that beams differ."""
        place = (work.sequence * _MULTIPLIER ^ work.end * (_MULTIPLIER >> 7)) >> 11
        return tuple(enumerate(self._candidates[place % len(self._candidates)][: work.candidates]))


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
