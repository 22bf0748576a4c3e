"""Runs `make demo` repeatedly, and measures the times that a new user sees.

Each repetition has a first run, in a clone of the commit with empty caches, so that it installs, downloads and compiles
everything, and a later one in this folder. The time of first runs depends on the package index.
"""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from bench.report.results import publish, repeated, row
from bench.report.targets import ROOT
from bench.report.terms import Terms

REPETITIONS = 5
FIGURES = {
    "first_token_seconds": "s",
    "time_to_first_token_seconds": "s",
    "stream_tokens_per_second": "tokens/s",
    "prefix_hit_tokens": "tokens",
    "prompt_tokens": "tokens",
}
# As users run it: the demo model's file as it is.
FIRST, LATER = (Terms(weights="int4", processes=3, work="make demo", start=start) for start in ("cold", "warm"))
CODE = ("blocks", "engine", "kvmanager", "services", "protos", "Makefile", "constraints.txt", "bench/serving/demo.py")


def main() -> None:
    """Measure first runs and later ones."""
    _run(ROOT, {})  # so that this folder's later runs are measured
    first, runs = [], []
    for _ in repeated(REPETITIONS, "Running the demo", warm_up=False):
        first.append(_first_run())
        runs.append(_run(ROOT, {}))
    rows = [
        row("demo", name, round(median(run[name] for run in runs), 3), unit, terms={"quire": LATER})
        for name, unit in FIGURES.items()
    ]
    beginning = round(median(run["first_token_seconds"] for run in first), 3)
    rows.append(row("demo", "first_run_first_token_seconds", beginning, "s", terms={"quire": FIRST}))
    publish("demo", rows, REPETITIONS, code=CODE, runs=runs, first_runs=first)


def _first_run() -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as home:
        clone = Path(home) / "quire"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        caches = {"HOME": home, "XDG_CACHE_HOME": f"{home}/.cache", "QUIRE_CACHE": f"{home}/.cache/quire"}
        return _run(clone, caches)


def _run(folder: Path, environment: dict[str, str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as output:
        results = Path(output) / "demo.json"
        begun = time.time()
        command = ["make", "--silent", "demo", f"ARGS=--results {results}"]
        subprocess.run(command, cwd=folder, env={**os.environ, **environment}, check=True, capture_output=True)
        figures: dict[str, float] = json.loads(results.read_text())
    figures["first_token_seconds"] = round(figures.pop("first_token_at") - begun, 3)
    return figures


if __name__ == "__main__":
    main()
