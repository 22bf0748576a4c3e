"""A figure of a paper, as `make papers` remakes it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.papers.case import Case, Values
from bench.papers.rows import PaperRow


class Figure(NamedTuple):
    """One figure of a paper: the cases to compute, and how their values become rows and a picture.

    `name` is a Python identifier, such as `figure_18a`; the names of the cases and rows begin with it. `cases(quick)`
    returns the cases. `draw(panels, values)` draws the picture, with its panels in reading order. `inches` is width and
    height of the picture, `seen` its alternative text. `of_capacities` marks figures of the rates that systems sustain:
    on the short traces of a quick run, these rates come out too high.
    """

    name: str
    title: str
    cases: Callable[[bool], list[Case]]
    rows: Callable[[Mapping[str, Values]], list[PaperRow]]
    draw: Callable[[Sequence[Any], Mapping[str, Values]], None]
    panels: tuple[int, int]  # rows, columns
    inches: tuple[float, float]
    seen: str
    of_capacities: bool = False
