"""Perplexity of WikiText with the KV cache in blocks, compared with transformers without a cache, in float32."""

import math
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch
from rich.progress import track

from bench.loads.engine_worker import demo_parts
from bench.loads.memory import DATA_VARIABLE, DataMissing
from bench.report.results import publish, row
from engine.run.loop import Engine
from engine.schedule.outputs import Scored
from engine.schedule.request import Request, Sampling, Stopping
from engine.schedule.scheduler import Scheduler
from services.engine.startup.assembly import EngineParts
from services.models.model_store import default_cache, resolve
from tests.in_process import InProcessBlocks
from tests.reference import reference_model

WINDOWS, WINDOW_TOKENS = 20, 1024
TOKEN_BUDGET = 192  # each window is prefilled in several chunks


def main() -> None:
    """Measure both, and publish their difference."""
    logprobs = logprobs_of_windows(WINDOWS, WINDOW_TOKENS)
    ours, theirs = (perplexity(logprobs[way], WINDOW_TOKENS) for way in ("in_blocks", "transformers"))
    rows = [
        row("perplexity", "perplexity_in_blocks", round(ours, 6), "1"),
        row("perplexity", "perplexity_of_transformers_without_cache", round(theirs, 6), "1"),
        row("perplexity", "relative_difference", abs(ours / theirs - 1), "ratio", "transformers"),
    ]
    tokens = WINDOWS * (WINDOW_TOKENS - 1)
    publish("perplexity", rows, 1, tokens=tokens, window_tokens=WINDOW_TOKENS, logprobs_of_windows=logprobs)


def logprobs_of_windows(count: int, window_tokens: int) -> dict[str, list[float]]:
    """Return for each way, and each window of WikiText, the sum of its tokens' log-probabilities but the first's.

    Raises DataMissing.
    """
    folder = resolve("demo", default_cache(), lambda *_: None)
    windows = _windows(folder, count, window_tokens)
    parts = demo_parts(128, dtype="float32", token_budget=TOKEN_BUDGET)
    return {
        "in_blocks": [_paged(parts, window) for window in track(windows, "In blocks")],
        "transformers": [_plain(folder, window) for window in track(windows, "transformers")],
    }


def perplexity(logprobs: Sequence[float], window_tokens: int) -> float:
    """Return the perplexity of windows from the sums of their log-probabilities."""
    return math.exp(-sum(logprobs) / (len(logprobs) * (window_tokens - 1)))


def _windows(folder: Path, count: int, window_tokens: int) -> list[list[int]]:
    data = os.environ.get(DATA_VARIABLE, "")
    if not data:
        raise DataMissing(f"{DATA_VARIABLE} names no folder with wikitext2_valid.txt")
    text = (Path(data) / "wikitext2_valid.txt").read_text()
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    starts = range(0, (count + 1) * window_tokens, window_tokens)
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
