"""The unit of work of `make papers`: what is computed at once, and kept once it is computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# Plain JSON: numbers, texts, lists and mappings.
Values = Mapping[str, Any]


class Case(NamedTuple):
    """One call `run(**arguments)`, whose values are kept under `name`.

    `run` is a function of a module, and its arguments are plain JSON, so that it can run in another process. Timed
    cases run alone, after all others. `files` are those that it reads in the folder of the data.
    """

    name: str
    run: Callable[..., Values]
    arguments: dict[str, Any]
    timed: bool = False
    files: Sequence[str] = ()
