"""What kept blocks cost while nothing fails: CPU time per token with memory that outlives the process, and without.

The demo model in bfloat16 with the KV manager as a process. The arms take turns in each repetition: private memory,
that once more, a file in tmpfs, and, where QUIRE_HUGE_PAGES names its folder, a file in hugetlbfs.
"""

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from bench.blocks.kv_engine import Run, Work, over_grpc
from bench.loads.engine_worker import BFLOAT16, demo_parts, terms_of
from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from services.engine.block_client import BlockClient
from services.engine.startup.assembly import EngineParts

REPETITIONS = 9
BLOCKS = 1024
WORKS = {"prefill": Work(8, 1024, 1), "decode": Work(16, 24, 80)}
HUGE_PAGES = "QUIRE_HUGE_PAGES"
CODE = ("blocks", "engine", "kvmanager", "protos", "services", "bench/blocks/kept_cpu.py", "bench/blocks/kv_engine.py")

Runs = Sequence[dict[str, Run]]  # figures of each arm, for each repetition


def main() -> None:
    """Measure, and publish the costs."""
    runs: dict[str, list[dict[str, Run]]] = {name: [] for name in WORKS}
    with ExitStack() as stack:
        arms = _arms(stack)
        for number in repeated(REPETITIONS, "Kept blocks"):
            for name, work in WORKS.items():
                run = {arm: over_grpc(arms[arm], BlockClient, work) for arm in in_turn(list(arms), number)}
                if number:
                    runs[name].append(run)
        terms = {name: terms_of(arms["private"], name, processes=2) for name in WORKS}
    rows = [one for name in WORKS for one in _rows(name, runs[name], terms[name])]
    publish("kept_cpu", rows, REPETITIONS, code=CODE, runs=runs)


def _arms(stack: ExitStack) -> dict[str, EngineParts]:
    private = demo_parts(BLOCKS, **BFLOAT16)
    arms = {"private": private, "again": private, "tmpfs": _kept(stack, Path("/dev/shm"))}
    if folder := os.environ.get(HUGE_PAGES):
        arms["hugetlbfs"] = _kept(stack, Path(folder))
    return arms


def _kept(stack: ExitStack, parent: Path) -> EngineParts:
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir=parent))
    return demo_parts(BLOCKS, keep_blocks=f"{folder}/kept", **BFLOAT16)


def _rows(name: str, runs: Runs, terms: Terms) -> list[Row]:
    columns = {arm: [run[arm]["cpu_us_per_computed_token"] for run in runs] for arm in runs[0]}
    rows = [
        row("kept_cpu", f"{name}_{arm}_cpu_us_per_token", round(median(column), 2), "us", terms={arm: terms})
        for arm, column in columns.items()
        if arm != "again"
    ]
    null = null_interval(columns["private"], columns["again"])
    for arm in columns.keys() - {"private", "again"}:
        ratio = median(one / other for one, other in zip(columns[arm], columns["private"], strict=True))
        sides = {arm: terms, "private": terms}
        rows.append(
            row("kept_cpu", f"{name}_{arm}_over_private", round(ratio, 4), "ratio", "private memory", terms=sides)
        )
        if arm == "tmpfs":
            cost = max(0.0, ratio - 1) / (null[1] - null[0])
            rows.append(row("kept_cpu", f"{name}_cost_over_null_interval", round(cost, 2), "widths", terms=sides))
    return rows


if __name__ == "__main__":
    main()
