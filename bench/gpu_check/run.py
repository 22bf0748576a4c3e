"""A run of parts: their processes in order within a time, and their results, written after each line of output."""

import json
import math
import os
import signal
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.gpu_check import DRY, REPETITIONS, probe
from bench.gpu_check.budgets import limit_of, working_seconds
from bench.gpu_check.notes import Result
from bench.gpu_check.processes import Part
from bench.report.results import write

# Without a GPU kernels are interpreted, and figures have no meaning.
PATIENCE = 10 if DRY else 1
# What the rows measured: changes of other code make no row stale.
CODE = ("engine", "bench/gpu_check")
RESULTS_VARIABLE = "QUIRE_GPU_CHECK_RESULTS"


@dataclass
class Check:
    """Runs parts with these budgets within `seconds` since `begun`; the results go to gpu.json in a folder."""

    budgets: Mapping[str, float]
    seconds: float
    begun: float
    folder: Path
    hardware: dict[str, Any]
    result: Result = field(default_factory=Result)
    lost: str | None = None

    def run(self) -> None:
        """Run all parts. A part that fails costs its own rows only, and so does a disk that is full for a while."""
        # A later part may read what earlier ones found.
        os.environ[RESULTS_VARIABLE] = str(self.folder / "gpu.json")
        left = list(self.budgets)
        while left:
            name = left.pop(0)
            now = time.monotonic()
            later = [self.budgets[one] * PATIENCE for one in left]
            limit = limit_of(self.budgets[name] * PATIENCE, later, self.seconds - (now - self.begun))
            # Interpreted kernels have a limit that says nothing.
            print(name if DRY else f"{name}: within {limit:.0f} s", flush=True)
            if failure := self._follow(name, limit):
                self._fail(name, failure)

    def more(self) -> dict[str, Any]:
        """Return what the file has beside its rows."""
        found = {"raw": self.result.raw, "failures": self.result.failures, "hardware": self.hardware}
        return found | ({"dry": True} if DRY else {})

    def end(self) -> None:
        """Print the time, and exit with 1 after a failure."""
        print(f"took {time.monotonic() - self.begun:.0f} s")
        if self.lost:
            sys.exit(f"the last results could not be written: {self.lost}")
        if self.result.failures:
            sys.exit("failed: " + "; ".join(f"{part}: {what}" for part, what in self.result.failures.items()))

    def _follow(self, name: str, limit: float) -> str | None:
        until = time.monotonic() + working_seconds(limit)
        command = [sys.executable, "-m", "bench.gpu_check.part", name, str(until), *(["--dry"] if DRY else [])]
        try:
            return Part(command).follow(limit, self._take)
        except OSError as error:  # no process, no descriptor or no memory now
            return f"{type(error).__name__}: {error}"

    def _fail(self, name: str, failure: str) -> None:
        # The reason that the part itself wrote says more.
        self.result.failures.setdefault(name, failure)
        self.result.raw[f"gpu_after_{name}"] = probe.state()
        self._write()

    def _take(self, line: str) -> None:
        self.result.take(line)
        self._write()

    def _write(self) -> None:
        try:
            write("gpu", self.result.rows, REPETITIONS, self.folder, CODE, **self.more())
            self.lost = None
        except OSError as error:
            self.lost = str(error)


def end_on_signals() -> None:
    """Let `timeout` or a lost terminal end the run in order: the processes of a part are a session of their own."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, lambda number, _: sys.exit(128 + number))


def seconds_of(text: str) -> float:
    """Return an option's number of seconds. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return seconds


def check_writable(folder: Path) -> None:
    """Exit if a file cannot be made in a folder: the results of ten minutes would be lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        sys.exit(f"--results: no file can be written in {folder}: {reason}")


def check_replaceable(path: Path, *, of_calls: bool = True) -> None:
    """Exit if a run would replace a file of more value: real results by dry ones; unless `of_calls`, those of calls."""
    try:
        found = json.loads(path.read_text())
        rows, dry = found["rows"], found.get("dry", False)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return
    if dry != DRY:
        whose = "of a dry run" if dry else "of a GPU"
        sys.exit(f"{path} has results {whose}, which this run would replace or mix: give --results another folder")
    if not of_calls and any("call" in row for row in rows):
        sys.exit(
            f"{path} has rows of `make gpu-first`, which this run would replace: give --results another folder, or move"
            " the file away; `make gpu-first CALL=merge` later adds the rows of first-1 to first-3 again"
        )
