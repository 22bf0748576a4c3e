"""Runs the whole check: tests, kernels, a model. `--dry` runs small cases without a GPU, and keeps no results.

Results are written at once to gpu.json, in bench/results or the folder of `--results`.
"""

import tempfile
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from bench.gpu_check import DRY, REPETITIONS, probe
from bench.gpu_check.budgets import BUDGETS, SECONDS
from bench.gpu_check.processes import bear_lost_output
from bench.gpu_check.run import (
    CODE,
    PATIENCE,
    Check,
    check_replaceable,
    check_writable,
    end_on_signals,
    results_folder,
    seconds_of,
)
from bench.report.results import print_rows, publish
from bench.report.targets import RESULTS, ROOT, device_of


def main() -> None:
    """Check and measure; exit with 1 after a failure."""
    options = _options()
    begun = time.monotonic()
    bear_lost_output()
    end_on_signals()
    with tempfile.TemporaryDirectory() as dry:
        folder = options.results or (Path(dry) if DRY else RESULTS / device_of("gpu"))
        check_writable(folder)
        check_replaceable(folder / "gpu.json", of_calls=False)
        budgets = {name: BUDGETS[name] for name in options.parts}
        check = Check(budgets, options.seconds, begun, folder, probe.hardware())
        check.run()
    if DRY:
        print_rows("gpu, dry: the figures mean nothing", check.result.rows)
    else:  # pragma: no cover - the results of a GPU
        publish("gpu", check.result.rows, REPETITIONS, options.results, CODE, **check.more())
    if options.results or not DRY:
        print(f"results: {folder / 'gpu.json'}")
    check.end()


def _options() -> Namespace:
    # No abbreviations, because DRY is known before.
    parser = ArgumentParser(prog="python -m bench.gpu_check", description=__doc__, allow_abbrev=False)
    parser.add_argument("--dry", action="store_true", help="small cases, without a GPU")
    parser.add_argument(
        "--seconds", type=seconds_of, default=SECONDS * PATIENCE, help="that the whole may take: %(default)s"
    )
    folder = RESULTS.relative_to(ROOT)
    parser.add_argument("--results", type=results_folder, help=f"folder for gpu.json: {folder}/gpu, but if dry")
    parser.add_argument("--parts", type=_parts, default=list(BUDGETS), help=f"names with commas: {','.join(BUDGETS)}")
    options = parser.parse_args()
    if len(options.parts) < len(BUDGETS) and not (options.results or DRY):
        parser.error(f"argument --parts: give --results too: the file in {folder}/gpu has the rows of all parts")
    return options


def _parts(text: str) -> list[str]:
    """Return the named parts in their order."""
    names = text.split(",")
    if unknown := [name for name in names if name not in BUDGETS]:
        raise ArgumentTypeError(f"there is no part {unknown[0]!r}; they are {', '.join(BUDGETS)}")
    return [name for name in BUDGETS if name in names]


if __name__ == "__main__":
    main()
