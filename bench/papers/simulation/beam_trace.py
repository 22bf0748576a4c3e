"""The parents of beams, recorded from beam searches of a real model and replayed in simulations.

`python -m bench.papers.record_searches` writes `beam_trace.json`: one string of digits for each search of each width,
with `width` digits a step. Digit j of a step is the parent of beam j, as a number among the beams of the step before.

Each replayed beam is a node: one beam of one step of a recorded search. Its last token is the node's id, so the token
identifies the node whichever sequence holds it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_suffix(".json")
WIDTHS = (2, 4, 6)
SEARCHES, OUTPUT_TOKENS = 16, 192
_STEPS = OUTPUT_TOKENS - 1  # the last step has answers only
_SETTLED = 64  # the step of the next search at which a search goes on that is longer than the recorded ones
VOCABULARY_OF_NODES = SEARCHES * _STEPS * max(WIDTHS)


class NotRecorded(ValueError):
    """No searches of a width were recorded."""


class RecordedSearches:
    """The recorded searches of one width. Nodes are numbered from 0."""

    def __init__(self, width: int, searches: Sequence[str]) -> None:
        """Take the parents of each search: `width` digits for each step, as many steps for each."""
        self.width = width
        self._count = len(searches)
        self._steps = len(searches[0]) // width
        self._children: list[list[int]] = [[] for _ in range(self._count * self._steps * width)]
        for search, parents in enumerate(searches):
            for step in range(1, self._steps):
                for beam in range(width):
                    parent = int(parents[step * width + beam])
                    self._children[self._node(search, step - 1, parent)].append(self._node(search, step, beam))

    def _node(self, search: int, step: int, beam: int) -> int:
        return (search * self._steps + step) * self.width + beam

    def first(self, number: int) -> Sequence[int]:
        """Return the beams of the first step of a search, by any number."""
        return [self._node(number % self._count, 0, beam) for beam in range(self.width)]

    def children(self, node: int) -> Sequence[int]:
        """Return the nodes that continue a node, or none if no beam continued it.

        The last step of a search is followed by a later step of the next search, whose beams it takes for its own.
        """
        place, beam = divmod(node, self.width)
        search, step = divmod(place, self._steps)
        if step == self._steps - 1:
            following = (search + 1) % self._count
            return self._children[self._node(following, min(_SETTLED, self._steps - 2), beam)]
        return self._children[node]


@cache
def recorded(width: int) -> RecordedSearches:
    """Return the searches of a width. Raises NotRecorded."""
    widths: Mapping[str, Sequence[str]] = json.loads(FILE.read_text())["widths"]
    if str(width) not in widths:
        raise NotRecorded(f"no searches of {width} beams were recorded, but of {', '.join(widths)}")
    return RecordedSearches(width, widths[str(width)])
