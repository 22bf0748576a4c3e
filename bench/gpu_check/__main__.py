"""Runs the whole check: tests, kernels, a model. `--dry` runs small cases without a GPU, and keeps no results.

Results are written at once to gpu.json, in bench/results or the folder of `--results`.
"""

import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

import torch

from bench.gpu_check import DRY, REPETITIONS
from bench.gpu_check.budgets import BUDGETS, SECONDS, limit_of, working_seconds
from bench.gpu_check.notes import Result
from bench.gpu_check.processes import Part
from bench.report.results import print_rows, publish, write
from bench.report.targets import RESULTS, ROOT

# Without a GPU kernels are interpreted, and figures have no meaning.
PATIENCE = 10 if DRY else 1


def main() -> None:
    """Check and measure; exit with 1 after a failure."""
    options = _options()
    if not DRY and not torch.cuda.is_available():
        sys.exit("no GPU found: DRY=1 runs small cases without one")
    begun = time.monotonic()
    # Of `timeout` or a lost terminal: the part's processes are a session of their own, and would go on with the GPU.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))
    if DRY:
        with tempfile.TemporaryDirectory() as folder:
            result = _checked(options, begun, options.results or Path(folder))
        print_rows("gpu, dry: the figures mean nothing", result.rows)
    else:  # pragma: no cover - the results of a GPU
        result = _checked(options, begun, options.results)
        publish("gpu", result.rows, REPETITIONS, options.results, **_more(result))
    print(f"took {time.monotonic() - begun:.0f} s")
    if result.failures:
        sys.exit("failed: " + "; ".join(f"{part}: {what}" for part, what in result.failures.items()))


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m bench.gpu_check", description=__doc__)
    parser.add_argument("--dry", action="store_true", help="small cases, without a GPU")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS * PATIENCE, help="that the whole may take: %(default)s"
    )
    parser.add_argument("--results", type=Path, help=f"folder for gpu.json: {RESULTS.relative_to(ROOT)}, but if dry")
    return parser.parse_args()


def _checked(options: Namespace, begun: float, folder: Path | None) -> Result:
    """Run the parts in order, and write all results after each line of output."""
    result = Result()

    def take(line: str) -> None:
        result.take(line)
        write("gpu", result.rows, REPETITIONS, folder, **_more(result))

    budgets = [seconds * PATIENCE for seconds in BUDGETS.values()]
    for place, name in enumerate(BUDGETS):
        now = time.monotonic()
        limit = limit_of(budgets[place], budgets[place + 1 :], options.seconds - (now - begun))
        print(f"{name}: within {limit:.0f} s", flush=True)
        until = now + working_seconds(limit)
        command = [sys.executable, "-m", "bench.gpu_check.part", name, str(until), *(["--dry"] if DRY else [])]
        if failure := Part(command).follow(limit, take):  # pragma: no cover - tests/bench/test_gpu_check.py
            result.failures[name] = failure
    return result


def _more(result: Result) -> dict[str, object]:
    return {"raw": result.raw, "failures": result.failures}


if __name__ == "__main__":
    main()
