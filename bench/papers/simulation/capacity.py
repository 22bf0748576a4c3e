"""The highest rate of requests that a system sustains, as in figures 12, 14, 16 and 17 of the PagedAttention paper."""

from collections.abc import Callable
from math import sqrt
from typing import Any

from bench.papers.simulation.run import simulate

# Seconds per output token, averaged over requests: a system sustains a rate if it stays below. It is half of the
# vertical axis of figure 12, where all curves rise steeply.
LATENCY_LIMIT = 0.5
_FACTOR = 1.3  # of the rates tried until one is sustained and the next is not
_MOST_TRIED = 10  # rates in each direction
_BELOW = (0.25, 0.6)  # of the capacity: further points of the curve

# The normalized latency at a rate, and whether it is only a lower bound.
Latency = tuple[float, bool]


def measure_capacity(start: float, halvings: int, **scenario: Any) -> dict[str, Any]:
    """Simulate a scenario at several rates; return its capacity in requests a second, and the points of its curve.

    Each point has the rate, the normalized latency in seconds per token, and whether that is a lower bound.
    `prompts_share` is the part of the time that prompts take at the highest rate known to be sustained. Rates
    increase from `start`, or decrease, until one is sustained and the next is not; `halvings` of that interval follow.
    """
    results: dict[float, Any] = {}

    def latency(rate: float) -> Latency:
        results[rate] = simulate(**scenario, rate=rate, latency_limit=LATENCY_LIMIT)
        return results[rate]["normalized_latency"], results[rate]["cut"]

    low, high = bracket(start, latency)
    for _ in range(halvings):
        middle = sqrt(low * high)
        low, high = (middle, high) if _holds(latency(middle)) else (low, middle)
    capacity = sqrt(low * high)
    for share in _BELOW:
        latency(share * capacity)
    points = [[rate, one["normalized_latency"], one["cut"]] for rate, one in sorted(results.items())]
    speeds = [one["simulated_seconds"] / one["cpu_seconds"] for one in results.values()]
    prompts = results[low]["prompt_seconds"] / results[low]["simulated_seconds"]
    return {
        "capacity": capacity,
        "low": low,
        "high": high,
        "points": points,
        "speeds": speeds,
        "prompts_share": prompts,
    }


def bracket(start: float, latency: Callable[[float], Latency]) -> tuple[float, float]:
    """Return two rates, a factor apart, of which the first is sustained and the second is not.

    Raises ArithmeticError if there are none near `start`.
    """
    rate, held = start, _holds(latency(start))
    for _ in range(_MOST_TRIED):
        following = rate * _FACTOR if held else rate / _FACTOR
        if _holds(latency(following)) != held:
            return (rate, following) if held else (following, rate)
        rate = following
    raise ArithmeticError(f"every rate from {start:g} to {rate:g} a second {'is' if held else 'is not'} sustained")


def _holds(latency: Latency) -> bool:
    return not latency[1] and latency[0] <= LATENCY_LIMIT
