"""Makes a failing scenario small: drops requests and faults as long as what is left still fails."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from simulation.scenario import Scenario

_MOST_TRIES = 300
_Item = TypeVar("_Item")


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool], orders: int = 3) -> Scenario:
    """Return a smaller scenario that fails too.

    Dropping an event changes the order of all others, so each smaller scenario is tried in some other orders as well.
    """
    tries = 0
    while tries < _MOST_TRIES:
        for smaller in _smaller(scenario):
            orders_tried = [replace(smaller, order=smaller.order + number) for number in range(orders)]
            tries += orders
            if (found := next(filter(fails, orders_tried), None)) is not None:
                scenario = found
                break
            if tries >= _MOST_TRIES:
                break
        else:
            return scenario
    return scenario


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Yield scenarios without halves, quarters, and so on, of their requests and faults, the smallest first."""
    for part in _parts(scenario.requests):
        yield scenario.without(requests=part)
    for faults in _parts(scenario.faults):
        yield scenario.without(faults=faults)


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    size = len(items)
    while size:
        for begin in range(0, len(items), size):
            yield items[begin : begin + size]
        size //= 2
