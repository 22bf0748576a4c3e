"""Faults that the product once had, planted again, so that the simulator shows that it finds them.

`python -m tests.simulation.planted_faults` plants each in a copy of the tree and simulates it until it is found.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[2]
PACKAGES = ("blocks", "kvmanager", "engine", "services", "simulation", "protos")
_GRACE_SECONDS = 120.0


class Edit(NamedTuple):
    """Replaces a text that occurs once in a file."""

    path: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the file below `root`."""
        file = root / self.path
        source = file.read_text()
        assert source.count(self.old) == 1, f"{self.path} has no single {self.old!r}"
        file.write_text(source.replace(self.old, self.new))


PLANTED: dict[str, tuple[Edit, ...]] = {
    "the engine sleeps after a fork without children": (
        Edit(
            "engine/run/loop.py",
            "None if progressed else self._idle_reason())",
            "None if progressed else IdleReason.ANSWER)",
        ),
    ),
    "an older incarnation registers during a newer one's handshake": (
        Edit("kvmanager/manager.py", '_check_not_older(spec, attaching.spec, "attaching")', "pass"),
    ),
    "the lease ends during a handshake": (
        Edit(
            "services/kvmanager/servicer.py",
            "if self._manager.is_live(session) and self._manager.is_attaching(session):",
            "if False:",
        ),
    ),
    "a pool with more sequences than blocks is not adopted": (
        Edit(
            "kvmanager/adoption.py",
            "    if not table or report.prompt_tokens < 0:\n",
            "    if len(state.sequences) >= state.spec.blocks or report.prompt_tokens < 0:\n",
        ),
    ),
    "a commit of one block makes a withheld block findable": (
        Edit(
            "kvmanager/tier/key_index.py",
            "        if not (self._marks.marked_count and self._marks.by_block[block]) and (\n"
            "            self._shards[key[0]].setdefault(key, block) is not block\n"
            "        ):\n",
            "        if self._shards[key[0]].setdefault(key, block) is not block:\n",
        ),
    ),
    "a host block's key outlives a swap that did not happen": (
        Edit("services/engine/replica.py", "replace(step, swap_outs=(), swap_ins=(), ", "replace(step, "),
    ),
    "a copy of a block that no key leads to is findable": (
        Edit(
            "kvmanager/verbs/swapping.py",
            "        if not source.marks.is_indexable(block):\n            target.marks.unindex(moved)\n",
            "",
        ),
    ),
    "a sequence is freed twice": (
        Edit(
            "engine/schedule/pool/releases.py",
            "if sequence.table and not sequence.release_pending:",
            "if sequence.table:",
        ),
    ),
    "the source of a copy is granted before the copy has run": (
        Edit(
            "kvmanager/verbs/growth.py",
            "        state.release_after_step((source,))\n",
            "        state.device.release((source,))\n",
        ),
    ),
    "requests wait behind one that a withheld block ended": (
        Edit("engine/schedule/pool/admission.py", "refused.group is group and ", ""),
    ),
}


def copied_tree(folder: Path) -> Path:
    """Copy what the simulator needs into a folder, and return it."""
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "prebuilt", "build")
        shutil.copytree(ROOT / package, folder / package, ignore=ignored)
    return folder


class Found(NamedTuple):
    """How a fault was found: after how many seconds, and by which violation."""

    seconds: float
    violation: str


def found(edits: Iterable[Edit], tree: Path, seconds: float, seed: int = 0) -> Found | None:
    """Plant a fault in a copy of the tree, and simulate for so many seconds; None if it is not found."""
    kept = {edit.path: (tree / edit.path).read_text() for edit in edits}
    for edit in edits:
        edit.apply(tree)
    begun = time.monotonic()
    try:
        violation = violation_in(tree, seconds, seed)
        return violation and Found(time.monotonic() - begun, violation)
    finally:
        for path, source in kept.items():
            (tree / path).write_text(source)


def violation_in(tree: Path, seconds: float, seed: int) -> str | None:
    """Simulate a tree; return its violation, or how the run ended before its time."""
    command = [sys.executable, "-m", "simulation", "--seconds", str(seconds), "--seed", str(seed), "--no-story"]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tree}:{tree / 'protos'}",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        run = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=seconds + _GRACE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return "a scenario does not end"
    if not run.returncode:
        return None
    return next((line for line in run.stdout.splitlines() if "violates" in line), f"exit: {run.stderr[-200:]}")


@click.command()
@click.option("--seconds", default=300.0, show_default=True, help="Seconds for each fault.")
@click.option("--only", default="", help="Part of the names of the faults to plant.")
def main(seconds: float, only: str) -> None:
    """Plant each fault, and print after how many seconds the simulator finds it."""
    table = Table("fault", "found after", "violation")
    with tempfile.TemporaryDirectory() as folder:
        tree = copied_tree(Path(folder) / "tree")
        chosen = {name: edits for name, edits in PLANTED.items() if only in name}
        for name, edits in track(chosen.items(), console=Console(stderr=True), transient=True):
            row = found(edits, tree, seconds)
            table.add_row(name, *((f"{row.seconds:.0f} s", row.violation) if row else ("not found", "")))
    Console(width=200).print(table)


if __name__ == "__main__":
    main()
