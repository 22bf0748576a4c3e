"""CPU microseconds of the engine's process for one sequence and step of steady decoding.

The model computes nothing; plans, the inputs of a step, its results and the messages to gateways are the engine's own.
In process, with the KV manager's core in the same process, whose time is subtracted; and over gRPC, with a KV manager
and a gateway as other processes. The earlier commit is checked out into a temporary folder and takes turns; this one
runs twice.

QUICK=1: a few steps of the smaller works; only prints its table. BASE=COMMIT: compare with this one; the same.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from bench.loads.peer import Worker
from bench.report.results import Row, in_turn, print_rows, publish, repeated, row
from bench.report.targets import ROOT
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from services.models.model_store import default_cache, resolve

# The last commit before block tables stayed on the device and plans were adopted without making them again.
USUAL_BASE = "e4f129bcbc50dd4dd93a407beacb0e5d852324b6"
BASE = os.environ.get("BASE", USUAL_BASE)
WORKER = ROOT / "bench" / "loads" / "workers" / "host_worker.py"
QUICK = bool(os.environ.get("QUICK"))
REPETITIONS = 1 if QUICK else 5
STEPS = {1: 400, 32: 200, 256: 60}  # by the number of sequences
SEQUENCES = (1, 32) if QUICK else tuple(STEPS)
CONTEXTS = (128,) if QUICK else (128, 1024)
WAYS = ("process", "grpc")
CODE = (
    "blocks",
    "engine",
    "services/engine",
    "services/wire",
    "bench/engine/host.py",
    "bench/loads/workers/host_worker.py",
)
MICRO = 1e6

Case = tuple[str, int, int]  # way, sequences, context
Runs = dict[str, dict[Case, list[float]]]  # microseconds, by checkout


def main() -> None:
    """Measure both checkouts in each repetition, and publish medians."""
    cases = [(way, count, context) for way in WAYS for count in SEQUENCES for context in CONTEXTS]
    runs: Runs = {name: {case: [] for case in cases} for name in ("quire", "again", "base")}
    with _workers() as workers:
        for number in repeated(REPETITIONS, "host"):
            for case in cases:
                for name in in_turn([*runs], number):
                    micros = _measure(workers["base" if name == "base" else "quire", case[0]], case)
                    runs[name][case] += [micros] if number else []
    named = {name: {_name(case): found for case, found in one.items()} for name, one in runs.items()}
    rows = [one for case in cases for one in _rows(runs, case)]
    if QUICK or BASE != USUAL_BASE:
        print_rows("host", rows)
    else:
        publish("host", rows, REPETITIONS, code=CODE, runs=named)


def _rows(runs: Runs, case: Case) -> list[Row]:
    ours, theirs = runs["quire"][case], runs["base"][case]
    ratio = median(own / base for own, base in zip(ours, theirs, strict=True))
    name, peer, null = _name(case), f"commit {BASE[:7]}", null_interval(ours, runs["again"][case])
    terms = Terms(processes=1 if case[0] == "process" else 3, work=name)
    return [
        row("host", f"{name}_us", round(median(ours), 1), "us", terms={"quire": terms}),
        row("host", f"{name}_base_us", round(median(theirs), 1), "us", peer, terms={"base": terms}),
        row(
            "host",
            f"{name}_over_base",
            round(ratio, 3),
            "ratio",
            peer,
            terms={"quire": terms, "base": terms},
            null=null,
        ),
    ]


def _name(case: Case) -> str:
    return "_".join(map(str, case))


def _measure(worker: Worker, case: Case) -> float:
    """Return the microseconds for a sequence and step."""
    _, sequences, context = case
    steps = STEPS[sequences] // (4 if QUICK else 1)
    used = worker.measure(json.dumps({"sequences": sequences, "context": context, "steps": steps}))
    seconds: float = used["cpu_seconds"]
    return seconds * MICRO / sequences / steps


@contextmanager
def _workers() -> Iterator[dict[tuple[str, str], Worker]]:
    """Start an engine of each checkout for each way."""
    model = str(resolve("demo", default_cache(), lambda *_: None))
    with ExitStack() as stack:
        checkouts = {"quire": ROOT, "base": stack.enter_context(_checkout())}
        yield {
            (name, way): stack.enter_context(_worker(folder, way, model))
            for name, folder in checkouts.items()
            for way in WAYS
        }


def _worker(checkout: Path, way: str, model: str) -> Worker:
    path = os.pathsep.join(str(checkout / folder) for folder in ("", "protos"))
    command = [sys.executable, str(WORKER), way, *([model] if way == "grpc" else [])]
    return Worker(f"{checkout.name}, {way}", command, {**os.environ, "PYTHONPATH": path}, folder=checkout, stops=False)


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
