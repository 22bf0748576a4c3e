"""What choices do, computed by real processes once for each cause.

A choice changes one process and the network (`State.parts`), and its effect depends on nothing but its cause. So an
effect, once computed, holds for all states in which its cause is the same. This is checked: one in `COMPARE_EVERY` of
the states found in this way is computed by real processes too, and compared.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from unittest.mock import patch

from simulation.exhaustive.checks import exit_faults, process_faults
from simulation.exhaustive.small_engine import SmallRequest
from simulation.exhaustive.state import Bounds, Cause, Choice, Effect, Local, Spent, State
from simulation.exhaustive.world import World
from simulation.invariants.errors_logged import ErrorsLogged
from simulation.invariants.violation import Violation
from simulation.quiet import quiet

COMPARE_EVERY = 1000
# Each world leaves some 500 objects.
_COLLECT_EVERY = 2000

Path = Callable[[], Sequence[Choice]]


class Effects:
    """Computes effects, and keeps them. `compared` counts the states that were computed for comparison.

    A state is given with the path to it: the parts of all choices from the beginning.
    """

    def __init__(self, bounds: Bounds, requests: tuple[SmallRequest, ...]) -> None:
        self.compared = 0
        self._bounds = bounds
        self._requests = requests
        self._locals: dict[bytes, Local] = {}
        self._kept: dict[Cause, Effect] = {}
        self._errors = ErrorsLogged()
        self._uses = 0
        self._worlds = count(1)

    @property
    def computed(self) -> int:
        """Number of effects that were computed."""
        return len(self._kept)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Prepare the interpreter for worlds within the context."""
        gc.collect()
        gc.freeze()
        # What the product freezes while an engine attaches would never be freed.
        with quiet(), self._errors, patch.object(gc, "freeze"):
            yield
        gc.unfreeze()

    def first_state(self) -> State:
        """Return the state at the beginning."""
        with self._world(list) as world:
            return world.state(Spent())

    def after(self, state: State, parts: Sequence[Choice], path: Path, ahead: int) -> State:
        """Return the state after the parts of a choice. Raises Violation.

        If an effect is computed for it, so are others behind it, at most `ahead` choices further.
        """
        current = state
        for part in parts:
            effect = self._kept.get(current.cause(part))
            if effect is None:
                return self._computed(state, parts, path, ahead)
            current = _applied(current, part, effect)
        self._uses += 1
        if self._uses % COMPARE_EVERY == 0:
            self._compare(current, parts, path)
        return current

    def story(self, path: Path) -> list[str]:
        """Return what happens on a path, a line for each choice."""
        with self._world(list) as world:
            return [f"{world.now - world.begun:9.3f}  {part.process} {world.make(part)}" for part in path()]

    def _computed(self, state: State, parts: Sequence[Choice], path: Path, ahead: int) -> State:
        with self._world(path) as world:
            after = state
            for part in parts:
                after = self._made(world, after, part)
            self._go_on(world, after, ahead)
        return after

    def _made(self, world: World, state: State, part: Choice) -> State:
        """Make a part of a choice in a world, check it, and keep its effect. Raises Violation."""
        world.make(part)
        faults = [f"{part.process} logs an error: {one}" for one in self._errors.found]
        if (process := world.by_label.get(part.process)) is not None:
            faults += process_faults(process)
        if faults:
            raise Violation(faults[0])
        effect = world.effect(part)
        after = _applied(state, part, effect)
        self._kept[state.cause(part)] = effect
        return after

    def _go_on(self, world: World, state: State, ahead: int) -> None:
        """Compute further effects as long as the state has choices with unknown ones: its world is there now.

        A violation is left to be found again, on the shortest path to it.
        """
        for _ in range(ahead):
            unknown = next(self._unknown(state), None)
            if unknown is None:
                return
            try:
                state = self._made(world, state.spend(unknown), unknown)
            except Violation:
                return

    def _unknown(self, state: State) -> Iterator[Choice]:
        for choice in state.choices(self._bounds):
            if state.parts(choice) == (choice,) and state.cause(choice) not in self._kept:
                yield choice

    def _compare(self, state: State, parts: Sequence[Choice], path: Path) -> None:
        """Compare a state with that of real processes. Raises AssertionError."""
        with self._world(lambda: [*path(), *parts]) as world:
            assert world.state(state.spent) == state, "a choice has an effect that its cause does not determine"
        self.compared += 1

    @contextmanager
    def _world(self, path: Path) -> Iterator[World]:
        """Yield a world at the end of a path."""
        if next(self._worlds) % _COLLECT_EVERY == 0:
            gc.collect()
        world = World(self._requests, self._locals)
        try:
            for part in path():
                world.make(part)
            yield world
        finally:
            world.close()
            self._errors.found.clear()  # by coroutines that were closed


def _applied(state: State, part: Choice, effect: Effect) -> State:
    """Return the state after a part of a choice. Raises Violation."""
    if effect.exit is not None and (faults := exit_faults(state, part.process, effect.exit)):
        raise Violation(faults[0])
    return state.after(part, effect)
