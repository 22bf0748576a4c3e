"""Log-probabilities of the most likely tokens, recorded from beam searches of a real model.

`python -m bench.papers.simulation.beam_candidates` records them anew into `beam_candidates.json`.
"""

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_suffix(".json")
_ROWS, _WIDTH = 512, 12
MOST_BEAMS = _WIDTH // 2  # a search compares two candidates for each beam
_SEARCHES, _BEAMS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 6, 20, 58


class TooFewCandidates(ValueError):
    """More candidates are needed than were recorded."""


@cache
def recorded(count: int) -> Sequence[Sequence[float]]:
    """Return rows of at least `count` log-probabilities, most likely first. Raises TooFewCandidates."""
    rows: list[list[float]] = json.loads(_FILE.read_text())["rows"]
    if count > len(rows[0]):
        raise TooFewCandidates(f"{count} candidates of a beam are needed, {len(rows[0])} were recorded")
    return rows


def main() -> None:
    """Run beam searches of the demo model on news, and keep a sample of the candidates of all beams."""
    from bench.blocks.sharing import text_of
    from bench.loads.memory import Lengths, searches
    from engine.run.loop import Engine
    from engine.schedule.scheduler import Scheduler
    from engine.schedule.step_plan import Launched, Sampled, StepPlan
    from services.engine.settings import EngineSettings
    from services.engine.startup.assembly import assemble
    from services.models.model_store import default_cache, resolve
    from tests.in_process import InProcessBlocks

    folder = resolve("demo", default_cache(), lambda *_: None)
    parts = assemble(EngineSettings(model=str(folder), dtype="float32", device_blocks=1024))
    found: list[Sampled] = []

    class Recording:
        def launch(self, plan: StepPlan) -> Launched:
            launched = parts.runner.launch(plan)
            found.extend(one for one in launched.result() if one.top)
            return launched

    scheduler = Scheduler(parts.scheduler.capacity, parts.scheduler.limits)
    engine = Engine(scheduler, Recording(), InProcessBlocks(scheduler.capacity), lambda: 0.0)
    lengths = [Lengths(_PROMPT_TOKENS, _OUTPUT_TOKENS)] * _SEARCHES
    for request in searches(lengths, _BEAMS, text_of(folder)):
        scheduler.requests.submit(request)
    while not scheduler.empty:
        engine.turn()
    rows = [[round(logprob, 3) for _, logprob in one.top[:_WIDTH]] for one in found]
    chosen = random.Random(0).sample(rows, _ROWS)
    source = f"SmolLM2-135M-Instruct, float32: {_SEARCHES} searches of {_BEAMS} beams, prompts of newstest2014"
    text = ",\n".join(json.dumps(row) for row in chosen)
    _FILE.write_text(f'{{"source": {json.dumps(source)}, "rows": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
