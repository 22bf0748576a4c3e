"""The picture of a benchmark's results, and the colours and target marks of all pictures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.report.targets import targets
from services.loadgen.report.drawing import BLUE, GREY, ORANGE, RED, SKY

__all__ = ["GREY", "MILLI", "ON_WHITE", "OTHER", "PEER", "QUIRE", "TARGET", "Picture", "Result", "target_of"]

QUIRE, PEER, OTHER, TARGET = BLUE, ORANGE, SKY, RED
MILLI = 1e-3
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}

Result = Mapping[str, Any]


class Picture(NamedTuple):
    """A picture: the function that draws results into axes, their number and size, and the alternative text."""

    draw: Callable[[Sequence[Any], Result], None]
    panels: int
    inches: tuple[float, float]
    title: str
    seen: str


def target_of(benchmark: str, metric: str) -> float:
    """Return the target of a metric."""
    value: float = targets()[benchmark][metric]["target"]
    return value
