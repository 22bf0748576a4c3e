"""Which beams continue which, recorded from beam searches of a real model, and replayed in simulations.

`python -m bench.papers.simulation.beam_trace` records them anew into `beam_trace.json`: for each width and search a
text of digits, `width` for each step. Digit j of a step is the parent of beam j: its number among the beams before.

A replayed beam is a node: a search, a step and a number. Its token is the node's id, so a beam's last token says which
node it is, whichever sequence holds it.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")
WIDTHS = (2, 4, 6)
_SEARCHES, _PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 40, 384
_STEPS = _OUTPUT_TOKENS - 1  # the last step has answers only
_SETTLED = 64  # the step of the next search at which a search goes on that is longer than the recorded ones
VOCABULARY_OF_NODES = _SEARCHES * _STEPS * max(WIDTHS)


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
        """Return the nodes that continue a node, none if it is pruned.

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
    widths: Mapping[str, Sequence[str]] = json.loads(_FILE.read_text())["widths"]
    if str(width) not in widths:
        raise NotRecorded(f"no searches of {width} beams were recorded, but of {', '.join(widths)}")
    return RecordedSearches(width, widths[str(width)])


def main() -> None:
    """Run beam searches of the demo model on news, and keep the parents of all beams."""
    from bench.blocks.sharing import text_of
    from services.models.model_store import default_cache, resolve

    folder = resolve("demo", default_cache(), lambda *_: None)
    text = text_of(folder)
    widths = {str(width): _record(width, folder, text) for width in WIDTHS}
    source = (
        f"SmolLM2-135M-Instruct, bfloat16: {_SEARCHES} searches of each width, prompts of {_PROMPT_TOKENS} tokens of "
        f"newstest2014, {_OUTPUT_TOKENS} tokens without an end of sequence"
    )
    _FILE.write_text(json.dumps({"source": source, "widths": widths}, indent=1) + "\n")


def _record(width: int, folder: Path, text: Sequence[int]) -> list[str]:
    """Return the parents of all steps of the searches of one width."""
    from unittest.mock import patch

    from bench.loads.memory import Lengths, searches, serve
    from engine.schedule.beams import Beams, Continuation
    from engine.schedule.scheduler import Scheduler
    from services.engine.settings import EngineSettings
    from services.engine.startup.assembly import assemble

    parts = assemble(EngineSettings(model=str(folder), dtype="bfloat16", weights="bf16", device_blocks=2048))
    parents: defaultdict[Beams, list[str]] = defaultdict(list)
    advance = Beams.advance

    def recording(beams: Beams, *found: Any) -> list[Continuation]:
        kept = advance(beams, *found)
        parents[beams] += [str(one.parent) for one in kept]
        return kept

    requests = searches([Lengths(_PROMPT_TOKENS, _OUTPUT_TOKENS)] * _SEARCHES, width, text)
    with patch.object(Beams, "advance", recording):
        serve(requests, Scheduler(parts.scheduler.capacity, parts.scheduler.limits), parts.runner, _nothing, print)
    return ["".join(digits) for digits in parents.values()]


def _nothing(*_: object) -> None:
    """Watch nothing."""


if __name__ == "__main__":
    main()
