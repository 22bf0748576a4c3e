"""Makes a failing scenario small: drops requests, faults and processes as long as what is left still fails."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from simulation.scenario import Scenario

_MOST_TRIES = 600
# Dropping an event changes the order of all others, so each smaller scenario is tried in other orders as well: more
# often without a process, which takes most of the story with it.
_ORDERS = 3
_ORDERS_WITHOUT_A_PROCESS = 12
_Item = TypeVar("_Item")


def shrunk(
    scenario: Scenario, fails: Callable[[Scenario], bool], progress: Callable[[Scenario], None] = lambda _: None
) -> Scenario:
    """Return a smaller scenario that fails too; `progress` receives each on the way."""
    tries = 0
    while tries < _MOST_TRIES:
        for smaller, orders in _smaller(scenario):
            orders_tried = [replace(smaller, order=smaller.order + number) for number in range(orders)]
            tries += orders
            if (found := next(filter(fails, orders_tried), None)) is not None:
                scenario = found
                progress(scenario)
                break
            if tries >= _MOST_TRIES:
                break
        else:
            return scenario
    return scenario


def _smaller(scenario: Scenario) -> Iterator[tuple[Scenario, int]]:
    """Yield smaller scenarios, each with the number of orders to try.

    First without a process, then without halves, quarters, and so on, of the requests and faults.
    """
    if scenario.steps:
        yield replace(scenario, steps=()), _ORDERS_WITHOUT_A_PROCESS
    if len(scenario.engines) > 1:
        yield replace(scenario, engines=scenario.engines[:-1]), _ORDERS_WITHOUT_A_PROCESS
    if len(scenario.gateways) > 1:
        requests = tuple(one._replace(gateway=0) for one in scenario.requests)
        yield replace(scenario, gateways=scenario.gateways[:1], requests=requests), _ORDERS_WITHOUT_A_PROCESS
    for part in _parts(scenario.requests):
        yield scenario.without(requests=part), _ORDERS
    for faults in _parts(scenario.faults):
        yield scenario.without(faults=faults), _ORDERS


def _parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    size = len(items)
    while size:
        for begin in range(0, len(items), size):
            yield items[begin : begin + size]
        size //= 2
