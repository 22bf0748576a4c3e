"""Perplexity of WikiText with the KV cache in blocks, compared with transformers without a cache, in float32.

Both are computed twice, and must be the same to the last bit.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch
from rich.progress import track

from bench.loads.engine_worker import demo_parts, prompt_logprobs, terms_of
from bench.loads.memory import DATA_VARIABLE, DataMissing
from bench.report.results import Row, publish, row
from bench.report.terms import Terms, check_equal
from services.engine.startup.assembly import EngineParts
from services.models.model_store import default_cache, resolve
from tests.reference import reference_model

WINDOWS, WINDOW_TOKENS = 20, 1024
CODE = ("blocks", "engine", "kvmanager", "services/engine", "bench/engine/perplexity.py")
TOKEN_BUDGET = 192  # each window is prefilled in several chunks


def main() -> None:
    """Measure both, and publish their difference."""
    logprobs, again = (logprobs_of_windows(WINDOWS, WINDOW_TOKENS) for _ in range(2))
    assert logprobs == again, "the same windows have other log-probabilities the second time"
    publish(
        "perplexity",
        rows_of(logprobs, terms_in_blocks()),
        2,
        code=CODE,
        tokens=WINDOWS * (WINDOW_TOKENS - 1),
        window_tokens=WINDOW_TOKENS,
        logprobs_of_windows=logprobs,
    )


def rows_of(logprobs: Mapping[str, Sequence[float]], in_blocks: Terms) -> list[Row]:
    """Return both perplexities and their difference. Raises UnequalTerms if ours is not of float32."""
    ours, theirs = (perplexity(logprobs[way], WINDOW_TOKENS) for way in ("in_blocks", "transformers"))
    plain = Terms(weights="float32", activations="float32", threads=torch.get_num_threads(), work=in_blocks.work)
    check_equal("all but the cache", {"quire": replace(in_blocks, kv_cache=None), "transformers": plain})
    rows = {
        "perplexity_in_blocks": (round(ours, 6), "1", None, {"quire": in_blocks}),
        "perplexity_of_transformers_without_cache": (round(theirs, 6), "1", None, {"transformers": plain}),
        # The cache in float32 is compared with none.
        "relative_difference_of_a_float32_cache": (
            abs(ours / theirs - 1),
            "ratio",
            "transformers",
            {"quire": in_blocks, "transformers": plain},
        ),
    }
    return [
        row("perplexity", metric, value, unit, peer, terms=terms, exact=True)
        for metric, (value, unit, peer, terms) in rows.items()
    ]


def terms_in_blocks() -> Terms:
    """Return the terms of the engine that computes in blocks."""
    return terms_of(_parts(), f"{WINDOWS} windows of {WINDOW_TOKENS} tokens")


@cache
def _parts() -> EngineParts:
    return demo_parts(128, dtype="float32", weights="auto", token_budget=TOKEN_BUDGET)


def logprobs_of_windows(count: int, window_tokens: int) -> dict[str, list[float]]:
    """Return for each way, and each window of WikiText, the sum of its tokens' log-probabilities but the first's.

    Raises DataMissing.
    """
    folder = resolve("demo", default_cache(), lambda *_: None)
    windows = windows_of(folder, count, window_tokens)
    parts = _parts()
    return {
        "in_blocks": [
            sum(prompt_logprobs(parts, window, parts.scheduler.limits)) for window in track(windows, "In blocks")
        ],
        "transformers": [_plain(folder, window) for window in track(windows, "transformers")],
    }


def perplexity(logprobs: Sequence[float], window_tokens: int) -> float:
    """Return the perplexity of windows from the sums of their log-probabilities."""
    return math.exp(-sum(logprobs) / (len(logprobs) * (window_tokens - 1)))


def windows_of(folder: Path, count: int, window_tokens: int) -> list[list[int]]:
    """Return the first windows of WikiText as token ids of the model in the folder. Raises DataMissing."""
    data = os.environ.get(DATA_VARIABLE, "")
    if not data:
        raise DataMissing(f"{DATA_VARIABLE} names no folder with wikitext2_valid.txt")
    text = (Path(data) / "wikitext2_valid.txt").read_text()
    ids = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    starts = range(0, (count + 1) * window_tokens, window_tokens)
    return [ids[start:end] for start, end in pairwise(starts)]


@torch.inference_mode()
def _plain(folder: Path, window: list[int]) -> float:
    ids = torch.tensor([window])
    logits = reference_model(folder)(input_ids=ids, use_cache=False).logits[0, :-1]
    return float(logits.log_softmax(dim=-1).gather(-1, ids[0, 1:, None]).sum())


if __name__ == "__main__":
    main()
