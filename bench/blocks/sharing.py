"""Blocks saved by sharing among samples and beams of one prompt, as in Figure 15 of the PagedAttention paper.

Samples are served without a model, twice with the same result. Beams run on the demo model in bfloat16.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import tokenizers
from rich.progress import Progress

import kvmanager
from bench.loads.engine_worker import terms_of
from bench.loads.memory import (
    CONTEXT_TOKENS,
    DATA_VARIABLE,
    VOCABULARY,
    Lengths,
    NoRunner,
    lengths_of,
    sampled_requests,
    scaled_to,
    searches,
    serve,
)
from bench.report.results import Row, publish, row
from bench.report.terms import Terms
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.request import Request
from engine.schedule.scheduler import Scheduler
from engine.schedule.step_plan import Runner
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from services.models.model_store import default_cache, resolve

CODE = ("blocks", "engine", "kvmanager", "bench/blocks/sharing.py", "bench/loads/memory.py")
BLOCK_SIZE = 16
BLOCKS = 980
REQUESTS = 500
WIDTHS = (2, 4, 6)
LIMITS = Limits(token_budget=512, max_sequences=256)
# Beams run on the demo model, which takes minutes for this many requests.
SEARCHES = {"alpaca": 40, "sharegpt": 8}
MEANS = {"alpaca": (19, 58), "sharegpt": (161, 338)}  # tokens of prompts and outputs in the paper
# Per cent of blocks saved in the paper, by the number of sequences.
PAPER_SAMPLES = {"alpaca": {2: 6.09, 4: 8.53, 6: 9.79}, "sharegpt": {2: 16.2, 6: 30.5}}
PAPER_BEAMS = {"alpaca": {2: 37.56, 4: 53.13, 6: 55.16}, "sharegpt": {2: 44.3, 6: 66.3}}


@dataclass
class SavedShares:
    """At each step the saved blocks over the blocks needed without sharing."""

    shares: list[float] = field(default_factory=list)

    def __call__(self, pool: kvmanager.Pool, _scheduler: Scheduler) -> None:
        """Record a pool's state after a step."""
        held = pool.device.counts.held
        if held:
            self.shares.append(pool.device.saved / (held + pool.device.saved))


def main() -> None:
    """Serve the mixes with several samples and with several beams, and publish the saved blocks."""
    files = {
        "alpaca": lengths_of("alpaca_lengths.csv", "prompt_tokens", "output_tokens"),
        "sharegpt": lengths_of("sharegpt_8k_lengths.csv", "num_prefill_tokens", "num_decode_tokens"),
    }
    scaled = {name: scaled_to(lengths, *MEANS[name]) for name, lengths in files.items()}
    with Progress() as progress:
        rows = _samples(scaled | {"alpaca_as_it_is": files["alpaca"]}, progress)
        rows += _beams(scaled, progress)
    publish("sharing", rows, 1, code=CODE, requests=REQUESTS, searches=SEARCHES)


def _samples(mixes: dict[str, list[Lengths]], progress: Progress) -> list[Row]:
    rows = []
    for name, lengths in mixes.items():
        for samples in WIDTHS:
            saved, again = (_saved_by_samples(name, lengths, samples, progress) for _ in range(2))
            assert saved == again, f"{name}, {samples} samples: {again} instead of {saved} the second time"
            terms, paper = Terms(work=f"{name}, {samples} samples"), PAPER_SAMPLES.get(name, {}).get(samples)
            rows += _rows(f"{name}_{samples}_samples", saved, paper, terms, exact=True)
    return rows


def _saved_by_samples(name: str, lengths: list[Lengths], samples: int, progress: Progress) -> float:
    scheduler = Scheduler(Capacity(CONTEXT_TOKENS, VOCABULARY, BLOCK_SIZE, BLOCKS), LIMITS)
    requests = sampled_requests(lengths[:REQUESTS], samples)
    return _saved(f"{name}, {samples} samples", requests, scheduler, NoRunner(), progress)


def _beams(mixes: dict[str, list[Lengths]], progress: Progress) -> list[Row]:
    folder = resolve("demo", default_cache(), lambda *_: None)
    parts = assemble(
        EngineSettings(model=str(folder), block_size=BLOCK_SIZE, device_blocks=BLOCKS, dtype="bfloat16", weights="bf16")
    )
    text = text_of(folder)
    rows = []
    for name, lengths in mixes.items():
        for width in WIDTHS:
            requests = searches(lengths[: SEARCHES[name]], width, text)
            scheduler = Scheduler(parts.scheduler.capacity, LIMITS)
            saved = _saved(f"{name}, {width} beams", requests, scheduler, parts.runner, progress)
            terms = terms_of(parts, f"{name}, {width} beams")
            rows += _rows(f"{name}_beam_width_{width}", saved, PAPER_BEAMS[name].get(width), terms, exact=False)
    return rows


def _rows(metric: str, saved: float, paper: float | None, terms: Terms, *, exact: bool) -> list[Row]:
    rows = [row("sharing", f"{metric}_saved", round(100 * saved, 2), "%", terms={"quire": terms}, exact=exact)]
    if paper is not None:
        rows.append(row("sharing", f"{metric}_saved_in_the_paper", paper, "%", "vLLM, paper"))
    return rows


def text_of(folder: Path) -> list[int]:
    """Return the tokens of the news file. Raises DataMissing."""
    text = (Path(os.environ[DATA_VARIABLE]) / "newstest2014_en.txt").read_text()
    token_ids: list[int] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return token_ids


def _saved(title: str, requests: list[Request], scheduler: Scheduler, runner: Runner, progress: Progress) -> float:
    task = progress.add_task(title, total=len(requests))
    watch = SavedShares()
    serve(requests, scheduler, runner, watch, lambda ended: progress.update(task, completed=ended))
    return mean(watch.shares)


if __name__ == "__main__":
    main()
