"""All states of the small universe up to a depth, breadth first, so that the path to a violation is the shortest."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from simulation.exhaustive.checks import rest_faults
from simulation.exhaustive.effects import Effects
from simulation.exhaustive.small_engine import SmallRequest
from simulation.exhaustive.state import Bounds, Choice, State
from simulation.invariants.violation import Violation

_REPORT_EVERY = 1000  # edges


@dataclass(slots=True)
class Counts:
    """What a search has done.

    `edges` lead to states that are new, or to `merged` ones. `resting` states have nothing to do unless time passes.
    `effects` were computed by real processes; `compared` states were computed by them for comparison. `unexpanded`
    states were found at the last depth, so what can happen in them is not known.
    """

    depth: int = 0
    states: int = 1
    edges: int = 0
    merged: int = 0
    resting: int = 0
    effects: int = 0
    compared: int = 0
    unexpanded: int = 0
    seconds: float = 0.0


class Found(NamedTuple):
    """How a state was found: the key of the state before, and the parts of the choice made there."""

    before: int
    parts: tuple[Choice, ...]


class Search:
    """Finds all states. `on_progress` receives the counts from time to time."""

    def __init__(
        self,
        bounds: Bounds,
        requests: tuple[SmallRequest, ...],
        on_progress: Callable[[Counts], None] = lambda _: None,
    ) -> None:
        self.counts = Counts()
        self._bounds = bounds
        self._on_progress = on_progress
        self._found: dict[int, Found] = {}
        self._effects = Effects(bounds, requests)
        self._begun = time.monotonic()

    def run(self, depth: int) -> Counts:
        """Find all states up to a depth, a number of choices. Raises Violation with the path to the first one."""
        with self._effects.running():
            frontier = [self._effects.first_state()]
            self._found[frontier[0].key()] = Found(0, ())
            while frontier and self.counts.depth < depth:
                ahead = depth - self.counts.depth - 1
                frontier = [new for state in frontier for new in self._expanded(state, ahead)]
                self.counts.depth += 1
                self.counts.unexpanded = len(frontier)
        self._report()
        return self.counts

    def _expanded(self, state: State, ahead: int) -> list[State]:
        """Return the new states after a state."""
        key, new = state.key(), []
        for choice in state.choices(self._bounds):
            found = Found(key, state.parts(choice))
            try:
                after = self._effects.after(state.spend(choice), found.parts, partial(self._path, key), ahead)
                is_new = self._is_new(after, found)
            except Violation as violation:
                raise Violation("\n".join([*self._story(found), f"violation: {violation}"])) from None
            if is_new:
                new.append(after)
        return new

    def _is_new(self, state: State, found: Found) -> bool:
        """Count an edge to a state; return whether it was not found before. Raises Violation."""
        self.counts.edges += 1
        if self.counts.edges % _REPORT_EVERY == 0:
            self._report()
        key = state.key()
        if key in self._found:
            self.counts.merged += 1
            return False
        self._found[key] = found
        self.counts.states += 1
        if next(state.progress(), None) is None:
            self._check_rest(state)
        return True

    def _check_rest(self, state: State) -> None:
        self.counts.resting += 1
        if faults := rest_faults(state):
            raise Violation(faults[0])

    def _path(self, key: int) -> list[Choice]:
        """Return the parts of all choices that lead to a state."""
        choices: list[tuple[Choice, ...]] = []
        while (found := self._found[key]).parts:
            choices.append(found.parts)
            key = found.before
        return [part for parts in reversed(choices) for part in parts]

    def _story(self, found: Found) -> list[str]:
        return self._effects.story(lambda: [*self._path(found.before), *found.parts])

    def _report(self) -> None:
        counts, effects = self.counts, self._effects
        counts.effects, counts.compared = effects.computed, effects.compared
        counts.seconds = time.monotonic() - self._begun
        self._on_progress(counts)
