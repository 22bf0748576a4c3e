"""A run of parts: their processes in order within a time, and their results, written after each line of output."""

import json
import math
import os
import signal
import sys
import tempfile
import textwrap
import time
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
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
_WIDTH = 130
# The states of a part in the file.
_WAITS, _RUNS, _ENDED = "not started", "running", "ended"


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
    parts: dict[str, str] = field(default_factory=dict)
    # "in order", or what ended it before; None while it runs, and for ever after SIGKILL.
    ended: str | None = None
    answers: bool = True

    def run(self) -> None:
        """Run all parts. A part that fails costs its own rows only, and so does a disk that is full for a while."""
        keep_earlier(self.folder / "gpu.json")
        # A later part may read what earlier ones found.
        os.environ[RESULTS_VARIABLE] = str(self.folder / "gpu.json")
        self.parts = dict.fromkeys(self.budgets, _WAITS)
        try:
            for name in self.budgets:
                self._run(name)
            self.ended = "in order"
        except BaseException as ending:
            self._interrupted(ending)
            raise
        finally:
            self._write()

    def more(self) -> dict[str, Any]:
        """Return what the file has beside its rows."""
        found = {"raw": self.result.raw, "failures": self.result.failures, "hardware": self.hardware}
        return found | {"parts": self.parts, "ended": self.ended} | ({"dry": True} if DRY else {})

    def end(self, unmerged: Sequence[str] = ()) -> None:
        """Print the time, and exit with 1 after a failure, or where results were not written or merged."""
        print(f"took {time.monotonic() - self.begun:.0f} s")
        reasons = [f"the last results could not be written: {self.lost}"] if self.lost else []
        if self.result.failures:
            reasons.append(textwrap.shorten(f"failed: {', '.join(self.result.failures)}", _WIDTH, placeholder=" ..."))
        if unmerged:
            reasons.append("the results were not all merged")
        if reasons:
            sys.exit("; ".join(reasons))

    def _run(self, name: str) -> None:
        limit = self._limit(name)
        if limit <= 0:
            # To start it only to kill it would take time that the call does not have.
            self.result.failures.setdefault(name, "not started: no time was left")
            return
        # Interpreted kernels have a limit that says nothing.
        print(name if DRY else f"{name}: within {limit:.0f} s", flush=True)
        self.parts[name] = _RUNS
        self._write()
        failure = self._follow(name, limit)
        self.parts[name] = _ENDED
        if failure:
            self._fail(name, failure)

    def _limit(self, name: str) -> float:
        later = [self.budgets[one] * PATIENCE for one, state in self.parts.items() if state == _WAITS and one != name]
        return limit_of(self.budgets[name] * PATIENCE, later, self.seconds - (time.monotonic() - self.begun))

    def _interrupted(self, ending: BaseException) -> None:
        number = ending.code - 128 if isinstance(ending, SystemExit) and isinstance(ending.code, int) else None
        self.ended = f"signal {number}" if number else type(ending).__name__
        for name, state in self.parts.items():
            if state != _ENDED:
                reason = f"interrupted: {self.ended}" if state == _RUNS else "it never ran"
                self.result.failures.setdefault(name, reason)

    def _follow(self, name: str, limit: float) -> str | None:
        until = time.monotonic() + working_seconds(limit)
        command = [sys.executable, "-m", "bench.gpu_check.part", name, str(until), *(["--dry"] if DRY else [])]
        try:
            return Part(command).follow(limit, self._take)
        except OSError as error:  # no process, no descriptor or no memory now
            return f"{type(error).__name__}: {error}"

    def _fail(self, name: str, failure: str) -> None:
        print(f"{name} failed: {failure}", flush=True)
        # The reason that the part itself wrote says more.
        self.result.failures.setdefault(name, failure)
        self._write()
        self.result.raw[f"gpu_after_{name}"] = self._state()
        self._write()

    def _state(self) -> str:
        """Ask for the GPU's state until there is no answer once: to wait for none takes the time of other parts."""
        if not self.answers:
            return "not asked: there was no answer before"
        try:
            found = probe.state()
        except Exception as error:
            found = f"{probe.SILENT}: {error}"
        self.answers = not found.startswith(probe.SILENT)
        return found

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
    """Let `timeout` or a lost terminal end the run in order: the processes of a part are a session of their own.

    Under nohup a lost terminal ends nothing.
    """
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is not signal.SIG_IGN:
            signal.signal(ending, _end_once)


def _end_once(number: int, _: FrameType | None) -> None:
    # A second signal would interrupt the end of the processes and the last write.
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.SIG_IGN)
    sys.exit(128 + number)


def seconds_of(text: str) -> float:
    """Return an option's number of seconds. Raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ArgumentTypeError(f"must be a number above 0, not {text!r}")
    return seconds


def results_folder(text: str) -> Path:
    """Return an option's folder. Raises ArgumentTypeError."""
    if not text.strip():
        raise ArgumentTypeError("must name a folder")
    return Path(text)


def earlier_of(path: Path) -> list[Path]:
    """Return the files of earlier runs, gpu.json.1 and so on, oldest first."""
    numbers = (found.name.removeprefix(f"{path.name}.") for found in path.parent.glob(f"{path.name}.*"))
    return [path.with_name(f"{path.name}.{one}") for one in sorted(int(text) for text in numbers if text.isdecimal())]


def keep_earlier(path: Path) -> None:
    """Rename the file of an earlier run, so that a run that crashes loses none of its rows. Exits if it cannot."""
    last = int(names[-1].name.rpartition(".")[2]) if (names := earlier_of(path)) else 0
    try:
        path.rename(path.with_name(f"{path.name}.{last + 1}"))
    except FileNotFoundError:
        return
    except OSError as error:
        sys.exit(f"{path} cannot be kept: {error.strerror}")


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
