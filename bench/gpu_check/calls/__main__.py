"""Runs one call of the first half hour on a GPU, or merges the results of calls: `python -m bench.gpu_check.calls 1`.

Its results go to first-1/gpu.json at once, and with those of the other calls to gpu.json, in bench/results/gpu or the
folder of `--results`. `--dry` runs small cases without a GPU, and keeps no results.
"""

import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from bench.gpu_check import DRY, probe
from bench.gpu_check.budgets import SECONDS
from bench.gpu_check.calls.budgets import CALLS
from bench.gpu_check.calls.merged import folder_of, merge
from bench.gpu_check.calls.summary import judged_by_base, predicted, summary
from bench.gpu_check.processes import bear_lost_output
from bench.gpu_check.run import (
    PATIENCE,
    Check,
    check_replaceable,
    check_writable,
    end_on_signals,
    results_folder,
    seconds_of,
)
from bench.report.targets import RESULTS, ROOT

# Kernels that one call has compiled, the next one finds.
_CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}


def main() -> None:
    """Run the call; exit with 1 after a failure."""
    options = _options()
    bear_lost_output()
    if options.call == "merge":
        sys.exit("; ".join(f"not merged: {one}" for one in merge(options.results or RESULTS / "gpu")) or None)
    begun = time.monotonic()
    for variable, name in _CACHES.items():
        os.environ.setdefault(variable, str(ROOT / "build" / "gpu-first" / name))
    end_on_signals()
    with tempfile.TemporaryDirectory() as dry:
        folder = options.results or (Path(dry) if DRY else RESULTS / "gpu")
        _run(int(options.call), options.seconds, begun, folder, kept=options.results is not None or not DRY)


def _run(call: int, seconds: float, begun: float, folder: Path, *, kept: bool) -> None:
    own = folder_of(call, folder)
    check_writable(own)
    check_replaceable(own / "gpu.json")
    check_replaceable(folder / "gpu.json")
    check = Check(CALLS[call], seconds, begun, own, probe.hardware())
    try:
        check.run()
    finally:  # also where the call is ended
        unmerged = merge(folder)
        print("\n".join(_summary(check, kept)), flush=True)
        for one in unmerged:
            print(f"not merged: {one}")
    check.end(unmerged)


def _summary(check: Check, kept: bool) -> list[str]:
    rows, path = check.result.rows, check.folder / "gpu.json" if kept else None
    if DRY:
        unjudged = [replace(row, target=None, met=None) for row in rows]
        return ["dry: the figures mean nothing", *summary(unjudged, check.result.failures, {}, path)]
    return summary(
        judged_by_base(rows), check.result.failures, predicted(), path
    )  # pragma: no cover - results of a GPU


def _options() -> Namespace:
    parser = ArgumentParser(prog="python -m bench.gpu_check.calls", description=__doc__, allow_abbrev=False)
    parser.add_argument("call", choices=[*map(str, CALLS), "merge"], help="which; merge: only write gpu.json again")
    parser.add_argument("--dry", action="store_true", help="small cases, without a GPU")
    parser.add_argument(
        "--seconds", type=seconds_of, default=SECONDS * PATIENCE, help="that the call may take: %(default)s"
    )
    folder = RESULTS.relative_to(ROOT)
    parser.add_argument("--results", type=results_folder, help=f"folder for the files: {folder}/gpu, but if dry")
    return parser.parse_args()


if __name__ == "__main__":
    main()
