"""Faults of the parts that the simulator runs: which of them the nearest tests find, and which the simulator."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from tests.mutants.faults import Fault, faults_of
from tests.simulation.planted_faults import ROOT, copied_tree, violation_in

FILES = (
    "kvmanager/**/*.py",
    "services/engine/block_client.py",
    "services/engine/replica.py",
    "engine/schedule/scheduler.py",
    "services/gateway/attempts.py",
)
# Where the nearest tests of a part are, those named like the module first.
TESTS = {
    "kvmanager": ("tests/kvmanager", "tests/contract"),
    "services/engine": ("tests/contract", "tests/services/engine"),
    "engine/schedule": ("tests/engine/schedule",),
    "services/gateway": ("tests/services/gateway",),
}
RESULTS = ROOT / "build" / "mutants" / "simulated"
# Columns of the table: who finds a fault.
TESTED, SIMULATED = "tests", "simulator"
_GRACE_SECONDS = 20.0


def drawn(seed: int, count: int) -> list[tuple[str, Fault]]:
    """Draw faults of the simulated parts, each with its file."""
    files = sorted({file for pattern in FILES for file in ROOT.glob(pattern)})
    every = [(str(file.relative_to(ROOT)), fault) for file in files for fault in faults_of(file.read_text())]
    return random.Random(seed).sample(every, count)


def nearest_tests(path: str) -> list[str]:
    """Return the test files and folders of a module, the nearest first."""
    folders = next(folders for part, folders in TESTS.items() if path.startswith(part))
    named = [file for folder in folders for file in sorted((ROOT / folder).rglob(f"test_*{Path(path).stem}*.py"))]
    return [*(str(file.relative_to(ROOT)) for file in named), *folders]


def _name(path: str, fault: Fault) -> str:
    return f"{path}:{fault.line}:{fault.start}:{fault.kind}"


def _tests_find(tree: Path, tests: Sequence[str], seconds: float) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'protos'}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(seconds) != 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Tries:
    """Tries faults in copies of the tree, one for each of `jobs`."""

    def __init__(self, folder: Path, jobs: int, seconds: float) -> None:
        self._seconds = seconds
        self._trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            tree = copied_tree(folder / f"tree{number}")
            for name in ("tests", "bench", "deploy", "docs", "helm"):
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
            for file in ("pyproject.toml", "README.md", "Makefile", "docker-compose.yml"):
                shutil.copy2(ROOT / file, tree)
            self._trees.put(tree)

    def red_unchanged(self, tests: Sequence[str]) -> bool:
        """Report whether tests fail without a fault: they would then count as finding each."""
        tree = self._trees.get()
        try:
            return _tests_find(tree, tests, self._seconds + _GRACE_SECONDS)
        finally:
            self._trees.put(tree)

    def attempt(self, finder: str, path: str, fault: Fault) -> dict[str, Any]:
        """Return whether `finder` finds a fault, and the violation if the simulator does."""
        tree = self._trees.get()
        source = (ROOT / path).read_text()
        found: bool | str | None
        try:
            (tree / path).write_text(fault.applied(source))
            if finder == TESTED:
                found = _tests_find(tree, nearest_tests(path), self._seconds + _GRACE_SECONDS)
            else:
                found = violation_in(tree, self._seconds, seed=0)
            return {"fault": _name(path, fault), finder: found}
        finally:
            (tree / path).write_text(source)
            self._trees.put(tree)


@contextmanager
def _tries(jobs: int, seconds: float) -> "Iterator[tuple[_Tries, ThreadPoolExecutor]]":
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        yield _Tries(Path(folder), jobs, seconds), pool


def _green(lists: Iterable[str], jobs: int, seconds: float, progress: Progress) -> Iterator[str]:
    """Run each list of nearest tests once without a fault; yield those that pass.

    Raises:
        ClickException: tests fail in an unchanged copy.
    """
    distinct = sorted(set(lists))
    task = progress.add_task("no fault", total=len(distinct))
    with _tries(jobs, seconds) as (tries, pool):
        running = {pool.submit(tries.red_unchanged, tests.split()): tests for tests in distinct}
        for done in as_completed(running):
            if done.result():
                raise click.ClickException(f"fails without a fault: pytest {running[done]}")
            yield running[done]
            progress.advance(task)


def _tried(faults: list[tuple[str, str, Fault]], jobs: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the results of faults, each with its finder."""
    with _tries(jobs, seconds) as (tries, pool):
        for done in as_completed([pool.submit(tries.attempt, *fault) for fault in faults]):
            yield done.result()


@click.command()
@click.option("--seed", default=1, show_default=True)
@click.option("--count", default=200, show_default=True, help="Faults to try.")
@click.option("--seconds", default=30.0, show_default=True, help="For the tests and for the simulator, each.")
@click.option("--jobs", default=2, show_default=True, help="Faults tried at the same time.")
@click.option("--finder", type=click.Choice(["both", TESTED, SIMULATED]), default="both", show_default=True)
def simulated(seed: int, count: int, seconds: float, jobs: int, finder: str) -> None:
    """Try faults of the simulated parts; what was tried is not tried again."""
    faults = drawn(seed, count)
    RESULTS.mkdir(parents=True, exist_ok=True)
    results = RESULTS / f"{seed}.jsonl"
    known = _read(results)
    finders = (TESTED, SIMULATED) if finder == "both" else (finder,)
    missing = [(one, *fault) for one in finders for fault in faults if one not in known.get(_name(*fault), {})]
    with Progress(console=Console(stderr=True)) as progress, results.open("a") as lines:
        tested = [" ".join(nearest_tests(path)) for one, path, _ in missing if one == TESTED]
        for green in _green([one for one in tested if one not in known], jobs, seconds, progress):
            lines.write(json.dumps({"fault": green, TESTED: False}) + "\n")
            lines.flush()
        task = progress.add_task("faults", total=len(missing))
        for row in _tried(missing, jobs, seconds):
            lines.write(json.dumps(row) + "\n")
            lines.flush()
            progress.advance(task)
    _show({_name(*fault): fault for fault in faults}, _read(results))


def _read(results: Path) -> dict[str, dict[str, Any]]:
    """Return what is known of each fault, by finder."""
    found: dict[str, dict[str, Any]] = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        row = json.loads(line)
        found.setdefault(row.pop("fault"), {}).update(row)
    return found


def _show(faults: dict[str, tuple[str, Fault]], known: dict[str, dict[str, Any]]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    rows = {name: row for name, row in known.items() if name in faults}
    for name, row in rows.items():
        if not (row.get(TESTED, True) or row.get(SIMULATED, True)):
            console.print(f"found by none: {name}: {faults[name][1].replacement}", markup=False)
    for finder in (TESTED, SIMULATED):
        tried = [row[finder] for row in rows.values() if finder in row]
        console.print(f"found by the {finder}: {sum(map(bool, tried))} of {len(tried)}")
    only = sum(bool(row.get(SIMULATED)) and not row.get(TESTED, True) for row in rows.values())
    console.print(f"found by the simulator only: {only}")
