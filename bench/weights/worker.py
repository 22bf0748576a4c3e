"""An engine process with one form of weights, for `bench weights`.

`python -m bench.weights.worker SETTINGS` has the settings of its engine as JSON, and reads workloads by name as JSON.
It prints the format of its weights as its name, and its terms, then figures for each line of JSON with one member:

    run       the name of a workload: seconds
    score     texts as token ids: the log-probabilities of their tokens but the first
    continue  prompts as token ids: their greedy tokens
"""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
import sys
from dataclasses import asdict
from typing import Any

from bench.loads.engine_worker import Item, demo_parts, greedy, prompt_logprobs, run, terms_of
from engine.schedule.limits import Limits
from services.engine.startup.assembly import EngineParts

DEVICE_BLOCKS = 1024
SETTINGS = {"token_budget": 2048, "max_sequences": 64}
# Texts are computed in several chunks, so that most keys and values that a token attends to were stored before.
SCORED_LIMITS = Limits(token_budget=192, max_sequences=64)
NEW_TOKENS = 64


def answer(parts: EngineParts, works: dict[str, list[Item]], order: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a line."""
    ((what, given),) = order.items()
    if what == "run":
        return run(parts, works[given])
    if what == "score":
        return {"logprobs": [prompt_logprobs(parts, text, SCORED_LIMITS) for text in given]}
    if what == "continue":
        return {"tokens": greedy(parts, given, NEW_TOKENS, SCORED_LIMITS)}
    raise ValueError(f"unknown work: {what}")


def main() -> None:
    """Answer each line of work."""
    works = json.loads(sys.stdin.readline())
    parts = demo_parts(DEVICE_BLOCKS, **SETTINGS, **json.loads(sys.argv[1]))
    announced = {"name": parts.loaded.weight_format, "terms": asdict(terms_of(parts, ""))}
    print(json.dumps(announced), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(parts, works, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
