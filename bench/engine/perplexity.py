"""Perplexity of WikiText with the KV cache in blocks, compared with transformers without a cache, in float32."""

import math
import os
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch
from rich.progress import track

from bench.loads.memory import DATA_VARIABLE, DataMissing
from bench.report.results import publish, row
from engine.run.loop import Engine
from engine.schedule.outputs import Scored
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble
from services.models.model_store import default_cache, resolve
from tests.in_process import InProcessBlocks
from tests.reference import reference_model

WINDOWS, WINDOW_TOKENS = 20, 1024
TOKEN_BUDGET = 192  # each window is prefilled in several chunks


def main() -> None:
    """Measure both, and publish their difference."""
    folder = resolve("demo", default_cache(), lambda *_: None)
    windows = _windows(folder)
    settings = EngineSettings(model=str(folder), dtype="float32", device_blocks=128, token_budget=TOKEN_BUDGET)
    parts = assemble(settings)
    paged = [_paged(parts, window) for window in track(windows, "In blocks")]
    plain = [_plain(folder, window) for window in track(windows, "transformers")]
    tokens = WINDOWS * (WINDOW_TOKENS - 1)
    ours, theirs = math.exp(-sum(paged) / tokens), math.exp(-sum(plain) / tokens)
    rows = [
        row("perplexity", "perplexity_in_blocks", round(ours, 6), "1"),
        row("perplexity", "perplexity_of_transformers_without_cache", round(theirs, 6), "1"),
        row("perplexity", "relative_difference", abs(ours / theirs - 1), "ratio", "transformers"),
    ]
    publish(
        "perplexity",
        rows,
        1,
        tokens=tokens,
        window_tokens=WINDOW_TOKENS,
        logprobs_of_windows={"in_blocks": paged, "transformers": plain},
    )


def _windows(folder: Path) -> list[list[int]]:
    data = os.environ.get(DATA_VARIABLE, "")
    if not data:
        raise DataMissing(f"{DATA_VARIABLE} names no folder with wikitext2_valid.txt")
    text = (Path(data) / "wikitext2_valid.txt").read_text()
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    starts = range(0, (WINDOWS + 1) * WINDOW_TOKENS, WINDOW_TOKENS)
    return [ids[start:end] for start, end in pairwise(starts)]


def _paged(parts: EngineParts, window: list[int]) -> float:
    """Return the sum of the log-probabilities of a window's tokens but the first."""
    scheduler = Scheduler(parts.scheduler.capacity, parts.scheduler.limits)
    engine = Engine(scheduler, parts.runner, InProcessBlocks(scheduler.capacity), lambda: 0.0)
    scheduler.requests.submit(
        Request("window", tuple(window), Sampling(temperature=0.0), Stopping(1), prompt_logprobs=0)
    )
    total = 0.0
    while not scheduler.empty:
        for output in engine.turn().outputs:
            if isinstance(output, Scored):
                total += sum(token.logprob or 0.0 for token in output.tokens)
        if engine.last_failure is not None:
            raise engine.last_failure
    return total


@torch.inference_mode()
def _plain(folder: Path, window: list[int]) -> float:
    ids = torch.tensor([window])
    logits = reference_model(folder)(input_ids=ids, use_cache=False).logits[0, :-1]
    return float(logits.log_softmax(dim=-1).gather(-1, ids[0, 1:, None]).sum())


if __name__ == "__main__":
    main()
