"""Runs the whole check: tests, kernels, a model. `--dry` runs small cases without a GPU, and keeps no results.

Results are written at once to gpu.json, in bench/results or the folder of `--results`.
"""

import math
import signal
import sys
import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check import DRY, REPETITIONS
from bench.gpu_check.budgets import BUDGETS, SECONDS, limit_of, working_seconds
from bench.gpu_check.notes import Result
from bench.gpu_check.processes import Part
from bench.report.results import print_rows, publish, write
from bench.report.targets import RESULTS, ROOT, device_of

# Without a GPU kernels are interpreted, and figures have no meaning.
PATIENCE = 10 if DRY else 1


def main() -> None:
    """Check and measure; exit with 1 after a failure."""
    options = _options()
    if not DRY and not torch.cuda.is_available():
        sys.exit("no GPU found: DRY=1 runs small cases without one")
    if options.results or not DRY:
        _check_writable(options.results or RESULTS / device_of("gpu"))
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
    # No abbreviations, because DRY is known before.
    parser = ArgumentParser(prog="python -m bench.gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dry", action="store_true", help="small cases, without a GPU")
    parser.add_argument(
        "--seconds", type=_seconds, default=SECONDS * PATIENCE, help="that the whole may take: %(default)s"
    )
    folder = RESULTS.relative_to(ROOT)
    parser.add_argument("--results", type=Path, help=f"folder for gpu.json: {folder}/gpu, but if dry")
    parser.add_argument("--parts", type=_parts, default=list(BUDGETS), help=f"names with commas: {','.join(BUDGETS)}")
    options = parser.parse_args()
    if len(options.parts) < len(BUDGETS) and not (options.results or DRY):
        parser.error(f"argument --parts: give --results too: the file in {folder}/gpu has the rows of all parts")
    return options


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return seconds


def _parts(text: str) -> list[str]:
    """Return the named parts in their order."""
    names = text.split(",")
    if unknown := [name for name in names if name not in BUDGETS]:
        raise ArgumentTypeError(f"there is no part {unknown[0]!r}; they are {', '.join(BUDGETS)}")
    return [name for name in BUDGETS if name in names]


def _check_writable(folder: Path) -> None:
    """Exit if a file cannot be made in a folder: the results of ten minutes would be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        sys.exit(f"--results: no file can be written in {folder}: {reason}")


def _checked(options: Namespace, begun: float, folder: Path | None) -> Result:
    """Run the parts in order, and write all results after each line of output."""
    result = Result()

    def take(line: str) -> None:
        result.take(line)
        write("gpu", result.rows, REPETITIONS, folder, **_more(result))

    budgets = [BUDGETS[name] * PATIENCE for name in options.parts]
    for place, name in enumerate(options.parts):
        now = time.monotonic()
        limit = limit_of(budgets[place], budgets[place + 1 :], options.seconds - (now - begun))
        print(f"{name}: within {limit:.0f} s", flush=True)
        until = now + working_seconds(limit)
        command = [sys.executable, "-m", "bench.gpu_check.part", name, str(until), *(["--dry"] if DRY else [])]
        if failure := Part(command).follow(limit, take):  # pragma: no cover - tests/bench/test_gpu_check.py
            result.failures[name] = failure
    return result


def _more(result: Result) -> dict[str, Any]:
    return {"raw": result.raw, "failures": result.failures}


if __name__ == "__main__":
    main()
