"""Seed faults in the product and count those that the tests find: `make mutants`."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

import click
from rich.console import Console
from rich.progress import Progress

from tests.mutants.coverage_plugin import SECONDS_FILE
from tests.mutants.faults import Fault, faults_of
from tests.mutants.selection import TestMap, branch_share
from tests.mutants.simulated import simulated

ROOT = Path(__file__).parents[2]
PACKAGES = ("blocks", "kvmanager", "engine", "services")
BUILD = ROOT / "build" / "mutants"
# What `make test` leaves out starts browsers, containers and clusters, or takes very long.
LEFT_OUT = ("acceptance", "browser", "deployment", "gpu_check", "mutants")
# Compiled kernels, which git ignores.
PREBUILT = "engine/native/prebuilt"
# Seconds of one test, and seconds beyond three times the usual time of all, after which a fault counts as found.
TEST_SECONDS = 60
GRACE_SECONDS = 120.0
SETTINGS = """\
[run]
branch = true
parallel = true
sigterm = true
source = {sources}
data_file = {data_file}
context = ${{PYTEST_CURRENT_TEST-}}
"""
# Measures every Python process of the tests, with the test that starts it as its context.
STARTUP = "import coverage\n\ncoverage.process_startup()\n"
_console = Console()


@dataclass(frozen=True)
class Mutant:
    """One fault of one file, whose path is relative to the root of the tree."""

    path: str
    fault: Fault

    @property
    def name(self) -> str:
        return f"{self.path}:{self.fault.line}:{self.fault.start}:{self.fault.kind}"


def all_mutants() -> list[Mutant]:
    """Return every fault of every module of the product."""
    files = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
    return [Mutant(str(file.relative_to(ROOT)), fault) for file in files for fault in faults_of(file.read_text())]


class Trees:
    """Copies of the tree, one for each fault that is tried at the same time."""

    def __init__(self, count: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
        for number in range(count):
            folder = BUILD / f"tree{number}"
            shutil.rmtree(folder, ignore_errors=True)
            for name in filter(None, tracked.stdout.split("\0")):
                if (ROOT / name).is_file():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, folder / name)
            if (ROOT / PREBUILT).is_dir():
                shutil.copytree(ROOT / PREBUILT, folder / PREBUILT, dirs_exist_ok=True)
            self._free.put(folder)

    def try_fault(self, mutant: Mutant, tests: TestMap) -> str:
        """Run the tests of a fault's line; return `found`, `timeout`, `survived` or `no test`."""
        selection = tests.select(mutant.path, mutant.fault.line)
        if not selection.node_ids:
            return "no test"
        tree = self._free.get()
        file = tree / mutant.path
        source = (ROOT / mutant.path).read_text()
        try:
            file.write_text(mutant.fault.applied(source))
            return _run(tree, selection.node_ids, 3 * selection.seconds + GRACE_SECONDS)
        finally:
            file.write_text(source)
            self._free.put(tree)


def _run(tree: Path, node_ids: Iterable[str], seconds: float) -> str:
    names = tree / "node_ids.txt"
    names.write_text("\n".join(node_ids))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n0"]
    command += [f"--timeout={TEST_SECONDS}", f"@{names}"]
    environment = {**os.environ, "PYTHONPATH": f"{tree}:{tree / 'protos'}", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return "survived" if process.wait(seconds) == 0 else "found"
    except subprocess.TimeoutExpired:
        return "timeout"
    finally:
        _end_group(process)


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """End what the tests started too: a fault may have kept them from ending it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(results: Path) -> dict[str, str]:
    return dict(json.loads(line) for line in results.read_text().splitlines()) if results.exists() else {}


def _tried(mutants: list[Mutant], jobs: int) -> Iterator[tuple[Mutant, str]]:
    tests = TestMap(BUILD / "coverage", BUILD / "seconds.jsonl", ROOT)
    trees = Trees(jobs)
    with ThreadPoolExecutor(jobs) as pool:
        tries = {pool.submit(trees.try_fault, mutant, tests): mutant for mutant in mutants}
        for done in as_completed(tries):
            yield tries[done], done.result()


@click.group()
def main() -> None:
    """Seed faults in the product and count those that the tests find."""


@main.command("map")
@click.argument("pytest_arguments", nargs=-1)
def make_map(pytest_arguments: tuple[str, ...]) -> None:
    """Run the tests under coverage, and write which of them run each line."""
    shutil.rmtree(BUILD, ignore_errors=True)
    BUILD.mkdir(parents=True)
    settings = BUILD / "coveragerc"
    sources = ",".join(str(ROOT / package) for package in PACKAGES)
    settings.write_text(SETTINGS.format(sources=sources, data_file=BUILD / "coverage"))
    startup = BUILD / "startup"
    startup.mkdir()
    (startup / "sitecustomize.py").write_text(STARTUP)
    environment = {
        **os.environ,
        SECONDS_FILE: str(BUILD / "seconds.jsonl"),
        "PYTHONPATH": str(startup),
        "COVERAGE_PROCESS_START": str(settings),
    }
    run = [sys.executable, "-m", "pytest", "-q", "-n", "3"]
    run += ["--dist", "loadfile", "-p", "tests.mutants.coverage_plugin", "-p", "no:cacheprovider", *pytest_arguments]
    run += [f"--ignore=tests/{name}" for name in LEFT_OUT]
    subprocess.run([*run], cwd=ROOT, env=environment, check=False)
    combine = [sys.executable, "-m", "coverage", "combine", f"--rcfile={settings}"]
    subprocess.run(combine, cwd=BUILD, check=True)
    _console.print(f"lines and branches covered: {branch_share(BUILD / 'coverage', settings):.1%}")


@main.command()
@click.option("--seed", default=1, show_default=True)
@click.option("--count", default=200, show_default=True, help="Faults to try.")
@click.option("--jobs", default=2, show_default=True, help="Faults tried at the same time.")
def run(seed: int, count: int, jobs: int) -> None:
    """Try faults drawn by seed; what was tried is not tried again."""
    drawn = random.Random(seed).sample(all_mutants(), count)
    results = BUILD / f"results-{seed}.jsonl"
    known = _read(results)
    missing = [mutant for mutant in drawn if mutant.name not in known]
    with Progress(console=_console) as progress, results.open("a") as lines:
        task = progress.add_task("faults", total=count, completed=count - len(missing))
        for mutant, outcome in _tried(missing, jobs):
            lines.write(json.dumps([mutant.name, outcome]) + "\n")
            lines.flush()
            progress.advance(task)
    _show(drawn, _read(results))


def _show(drawn: list[Mutant], results: dict[str, str]) -> None:
    for mutant in drawn:
        if results[mutant.name] in ("survived", "no test"):
            _console.print(f"{results[mutant.name]}: {mutant.name}: {mutant.fault.replacement}", markup=False)
    counts = Counter(results[mutant.name] for mutant in drawn)
    found = counts["found"] + counts["timeout"]
    _console.print(f"{found} of {len(drawn)} faults found ({found / len(drawn):.1%}): {dict(counts)}")


main.add_command(simulated)


if __name__ == "__main__":
    main()
