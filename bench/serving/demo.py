"""Runs `make demo` repeatedly, and measures the times that a new user sees.

The first run is in a clone of the commit with empty caches, so it installs, downloads and compiles everything: its time
depends on the package index. The others are in this folder.
"""

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.progress import track

from bench.report.results import publish, row
from bench.report.targets import ROOT

REPETITIONS = 5


def main() -> None:
    """Measure a first run, then later ones."""
    first = _first_run()
    _run(ROOT, {})  # so that this folder's later runs are measured
    runs = [_run(ROOT, {}) for _ in track(range(REPETITIONS), "Running the demo")]
    rows = [
        row("demo", name, round(median(run[name] for run in runs), 3), unit)
        for name, unit in (
            ("first_token_seconds", "s"),
            ("time_to_first_token_seconds", "s"),
            ("stream_tokens_per_second", "tokens/s"),
            ("prefix_hit_tokens", "tokens"),
            ("prompt_tokens", "tokens"),
        )
    ]
    rows.append(row("demo", "first_run_first_token_seconds", first["first_token_seconds"], "s"))
    publish("demo", rows, REPETITIONS, runs=runs, first_run=first)


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
