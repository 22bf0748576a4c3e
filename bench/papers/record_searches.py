"""Records which beams continue which in searches of the demo model: `python -m bench.papers.record_searches`."""

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

# First, because it sets how threads of torch wait.
from bench.loads.engine_worker import BFLOAT16, demo_parts  # isort: skip
from bench.blocks.sharing import text_of
from bench.loads.memory import Lengths, searches, serve
from bench.papers.simulation.beam_trace import FILE, OUTPUT_TOKENS, SEARCHES, WIDTHS
from engine.schedule.beams import Beams, Continuation
from engine.schedule.scheduler import Scheduler
from services.engine.startup.assembly import EngineParts
from services.models.model_store import default_cache, resolve

_PROMPT_TOKENS, _BLOCKS = 40, 2048


def main() -> None:
    """Run beam searches on news, and keep the parents of all beams."""
    parts = demo_parts(_BLOCKS, **BFLOAT16)
    text = text_of(resolve("demo", default_cache(), lambda *_: None))
    widths = {str(width): recorded(width, parts, text, SEARCHES, OUTPUT_TOKENS) for width in WIDTHS}
    source = (
        f"SmolLM2-135M-Instruct, bfloat16: {SEARCHES} searches of each width, prompts of {_PROMPT_TOKENS} tokens of "
        f"newstest2014, {OUTPUT_TOKENS} tokens without an end of sequence"
    )
    FILE.write_text(json.dumps({"source": source, "widths": widths}, indent=1) + "\n")


def recorded(width: int, parts: EngineParts, text: Sequence[int], count: int, output: int) -> list[str]:
    """Return the parents of all steps of `count` searches with `output` tokens: a digit for each beam."""
    parents: defaultdict[Beams, list[str]] = defaultdict(list)
    advance = Beams.advance

    def recording(beams: Beams, *found: Any) -> list[Continuation]:
        kept = advance(beams, *found)
        parents[beams] += [str(one.parent) for one in kept]
        return kept

    requests = searches([Lengths(_PROMPT_TOKENS, output)] * count, width, text)
    scheduler = Scheduler(parts.scheduler.capacity, parts.scheduler.limits)
    with patch.object(Beams, "advance", recording):
        serve(requests, scheduler, parts.runner, lambda *_: None, lambda _: None)
    return ["".join(digits) for digits in parents.values()]


if __name__ == "__main__":
    main()
