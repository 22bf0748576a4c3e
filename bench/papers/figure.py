"""A figure of a paper, as `make papers` remakes it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bench.papers.case import Case, Values
from bench.papers.rows import PaperRow


class Figure(NamedTuple):
    """One figure of a paper: its cases, and functions that make rows and a picture of the cases' values.

    `name` is a Python identifier, such as `figure_18a`, and begins the names of its cases and rows. `cases` receives
    whether it is a quick run. `panels` and `inches` (width, height) are those of the picture, `seen` its alternative
    text. Panels in several rows are numbered in reading order. Figures `of_capacities` show the rates that systems
    sustain, which short traces make too high.
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
