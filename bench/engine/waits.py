"""Who waits for whom: requests behind one prefix, traces with prefixes, and short prompts beside a long one.

Prefixes and traces run on virtual time, where figures repeat exactly; short and long prompts run on the CPU with a tiny
model and the demo model. The commit before prefix claims had hints takes turns: its figures are the ones "before". The
traces are in the folder QUIRE_DATA.

QUICK=1: no demo model, one repetition; only prints its table.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.loads.peer import Worker
from bench.papers.simulation.run import simulate
from bench.report.results import Row, print_rows, publish, repeated, row
from bench.report.targets import ROOT
from bench.report.terms import Terms

# The last commit in which a request behind a cached prefix waited for one answer after the other.
BASE = "9887f6645550eeb079561b25f2ff7736257d0dde"
WORKER = ROOT / "bench" / "loads" / "workers" / "waits_worker.py"
CODE = ("blocks", "engine", "kvmanager", "bench/engine/waits.py", "bench/loads/workers/waits_worker.py")
QUICK = bool(os.environ.get("QUICK"))
REPETITIONS = 1 if QUICK else 5
MODELS = ("tiny",) if QUICK else ("tiny", "demo")
EVERY = {"tiny": 0.2}  # seconds between bursts; else so many that they take half of the engine's time,
CALIBRATION_RUNS = 4  # which a shorter time finds step by step: bursts that overlap are computed together
ALONE_SECONDS = 20.0
MOST_SLOWDOWN = 1.15
# Figures 2 and 13 of the paper: requests a second, and its values: slots with tokens (%), and requests in the batch.
SLOTS_RATE, COUNT_RATE, SEEDS = 4.0, 2.0, 5
PAPER_SLOTS, PAPER_COUNT = 96.3, 30.42
VIRTUAL = {
    "shared": {"case": "behind_prefixes", "shared": True, "cached": True},
    "own": {"case": "behind_prefixes", "shared": False, "cached": True},
    "cold": {"case": "behind_prefixes", "shared": True, "cached": False},
    "agents": {"case": "agents"},
    "mooncake": {"case": "mooncake"},
}

Figures = Mapping[str, Any]


def main() -> None:
    """Measure both checkouts, and publish the rows."""
    with ExitStack() as stack:
        folders = {"quire": ROOT, "base": stack.enter_context(_checkout())}
        workers = {name: stack.enter_context(_worker(folder)) for name, folder in folders.items()}
        virtual = {
            name: {case: worker.measure(json.dumps(line)) for case, line in VIRTUAL.items()}
            for name, worker in workers.items()
        }
        beside: dict[str, dict[str, list[Figures]]] = {model: {"quire": [], "base": []} for model in MODELS}
        for number in repeated(REPETITIONS, "waits", warm_up=False):
            for model in MODELS:
                for name in ("quire", "base")[:: 1 if number % 2 else -1]:
                    beside[model][name].append(_beside(workers[name], model))
    rows = [*_virtual_rows(virtual), *_paper_rows()]
    rows += [one for model in MODELS for one in _beside_rows(model, beside[model])]
    if QUICK:
        print_rows("waits", rows)
    else:
        publish("waits", rows, REPETITIONS, code=CODE, virtual=virtual, beside=beside)


def _beside(worker: Worker, model: str) -> Figures:
    """Return the figures of short prompts alone, of the long one alone, and of both."""

    def measured(every: float, seconds: float, *, long: bool, short: bool) -> Figures:
        line = {"case": "beside", "name": model, "every": every, "seconds": seconds, "long": long, "short": short}
        return worker.measure(json.dumps(line))

    every = EVERY.get(model) or _every(lambda every: measured(every, 10 * every, long=False, short=True)["busy_share"])
    alone = measured(every, ALONE_SECONDS, long=False, short=True)
    long = measured(every, ALONE_SECONDS, long=True, short=False)
    both = measured(every, 20 * long["long_seconds"], long=True, short=True)
    share = min(0.95, alone["busy_share"])
    return {
        "short_alone_p99": alone["p99"],
        "short_p50": both["p50"],
        "short_p99": both["p99"],
        "short_p99_of_its_bound": both["p99"] / (3 * alone["p99"] + both["longest_step"]),
        "short_share": share,
        "long_alone_seconds": long["long_seconds"],
        "long_seconds": both["long_seconds"],
        "long_of_its_bound": both["long_seconds"] / long["long_seconds"] * (1 - share) / MOST_SLOWDOWN,
        "every": every,
    }


def _every(busy_share: Callable[[float], float]) -> float:
    """Return the seconds between bursts at which they take half of the engine's time."""
    every = 2.0
    for _ in range(CALIBRATION_RUNS):
        every *= 2 * busy_share(every)
    return every


def _virtual_rows(found: dict[str, dict[str, Figures]]) -> Iterator[Row]:
    ours, theirs = found["quire"], found["base"]
    peer = f"commit {BASE[:7]}"
    terms = {"quire": Terms(work="64 requests behind 1,000 tokens, virtual time")}
    for name, figures in (("", ours), ("_before", theirs)):
        shared, own, cold = figures["shared"], figures["own"], figures["cold"]
        waited = shared["first_token_p50"] / own["first_token_p50"]
        yield row("waits", f"shared_prefix_answers{name}", shared["answers"], "answers", terms=terms, exact=True)
        yield row("waits", f"shared_over_own_prefix_p50{name}", round(waited, 3), "ratio", terms=terms, exact=True)
        computed = round(cold["prefix_computed_times"], 3)
        yield row("waits", f"cold_prefix_computed{name}", computed, "times", terms=terms, exact=True)
    for trace in ("agents", "mooncake"):
        work = Terms(work=f"{trace}, virtual time")
        both = {"quire": work, "base": work}
        for metric, unit in (("hit_rate", "ratio"), ("tokens_per_second", "ratio")):
            ratio = ours[trace][metric] / theirs[trace][metric]
            yield row("waits", f"{trace}_{metric}_over_before", round(ratio, 4), unit, peer, terms=both, exact=True)


def _paper_rows() -> Iterator[Row]:
    """Return figures 2 and 13 of the PagedAttention paper by its definitions, and what preemptions cost meanwhile."""
    found = {rate: [_paper(rate, seed) for seed in range(1 if QUICK else SEEDS)] for rate in (COUNT_RATE, SLOTS_RATE)}
    slots = mean(one["shares"]["tokens"] for one in found[SLOTS_RATE])
    count = mean(one["batched"] for one in found[COUNT_RATE])
    again = [one["recomputed_tokens"] / one["computed_tokens"] for runs in found.values() for one in runs]
    terms = {"quire": Terms(work="ShareGPT, OPT-13B, 300 to 900 s of virtual time")}
    for metric, value, unit in (
        ("figure_2_slots_with_tokens", 100 * slots, "%"),
        ("figure_2_distance", abs(100 * slots - PAPER_SLOTS), "points"),
        ("figure_13_requests", count, "requests"),
        ("figure_13_distance", abs(count / PAPER_COUNT - 1), "share"),
        ("figures_recomputed", max(again), "share"),
    ):
        yield row("waits", metric, round(value, 4), unit, terms=terms, exact=True)


def _paper(rate: float, seed: int) -> Figures:
    sizes = {"system": "paged", "model": "opt-13b", "device": "a100-40g", "blocks": 983, "workload": "sharegpt"}
    return simulate(**sizes, rate=rate, seed=seed, seconds=900.0, warm_up=1 / 3, preemption="auto")


def _beside_rows(model: str, runs: dict[str, list[Figures]]) -> Iterator[Row]:
    terms = {"quire": Terms(processes=1, work=f"short prompts beside a long one, {model}")}
    for name, figures in (("", runs["quire"]), ("_before", runs["base"])):
        for metric, unit in (
            ("short_p99_of_its_bound", "ratio"),
            ("long_of_its_bound", "ratio"),
            ("short_alone_p99", "s"),
            ("short_p50", "s"),
            ("short_p99", "s"),
            ("long_alone_seconds", "s"),
            ("long_seconds", "s"),
            ("short_share", "share"),
        ):
            value = median(one[metric] for one in figures)
            yield row("waits", f"{model}_{metric}{name}", round(value, 3), unit, terms=terms)


@contextmanager
def _worker(checkout: Path) -> Iterator[Worker]:
    path = os.pathsep.join(str(checkout / folder) for folder in ("", "protos"))
    command = [sys.executable, str(WORKER)]
    with Worker(checkout.name, command, {**os.environ, "PYTHONPATH": path}, folder=checkout) as worker:
        yield worker


@contextmanager
def _checkout() -> Iterator[Path]:
    """Check out the earlier commit into a temporary folder."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "base"
        subprocess.run([*git, "add", "--detach", checkout, BASE], check=True, capture_output=True)
        try:
            yield checkout
        finally:
            subprocess.run([*git, "remove", "--force", checkout], check=True, capture_output=True)


if __name__ == "__main__":
    main()
