"""Measures peers in alternation with Quire, in processes of the Python interpreters that have them."""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from time import perf_counter
from types import TracebackType
from typing import Any

from bench.loads.class_limits import incomparable, limits_of
from bench.report.foreign_cpu import group_seconds
from bench.report.results import Row, row
from bench.report.targets import ROOT, device_of
from bench.report.terms import Terms

PEERS = ROOT / "bench" / "peers"

Figures = Mapping[str, Any]


class Worker:
    """A process that prints its name and its terms, then figures for each line that it reads, all as JSON.

    Its first line is `{"name": ..., "terms": {...}}`; the terms are those of `Terms` without the work, as the process
    found them, and may be missing. Between requests it is stopped with all its children, because some peers keep a core
    busy when idle. One whose connections would not survive that is not (`stops`).
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str | Path],
        environment: Mapping[str, str] | None = None,
        first: str = "",
        folder: Path | None = None,
        *,
        stops: bool = True,
    ) -> None:
        """Start it in a folder, write it the first input, and wait for its name.

        Raises RuntimeError if it ends instead, or prints something else.
        """
        self.label = label
        self.cores_used: float | None = None
        """CPU seconds of its process group over those of the clock, in the last repetition; None without /proc."""
        self._stops = stops
        self._process = subprocess.Popen(
            command,
            env=environment,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended by itself
            self._process.stdin.write(first)
            self._process.stdin.flush()
        announced = self._announced()
        self.name: str = announced["name"]
        self._terms: Mapping[str, Any] = announced.get("terms") or {}
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close its input, and wait until it exits."""
        with suppress(ProcessLookupError):  # it has ended by itself
            self._signal(signal.SIGCONT)
        self._process.communicate()

    def terms(self, work: str) -> Terms:
        """Return its terms for the named work."""
        return Terms(**{**self._terms, "work": work})

    def measure(self, line: str) -> Figures:
        """Run one repetition of the workload on the line. Raises RuntimeError if the process ends instead."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        before, begun = group_seconds(self._process.pid), perf_counter()
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        figures: Figures = json.loads(self._line())
        spent, after = perf_counter() - begun, group_seconds(self._process.pid)
        self.cores_used = None if before is None or after is None else round((after - before) / spent, 2)
        self._signal(signal.SIGSTOP)
        return figures

    def _signal(self, number: signal.Signals) -> None:
        if self._stops:
            os.killpg(self._process.pid, number)

    def _announced(self) -> dict[str, Any]:
        line = self._line()
        try:
            announced = json.loads(line)
        except ValueError:
            announced = None
        if not isinstance(announced, dict) or "name" not in announced:
            self._process.kill()
            self._process.communicate()
            raise RuntimeError(f"{self.label} printed {line!r} instead of its name and terms")
        return announced

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().rstrip("\n")
        if not line:
            self._process.communicate()
            raise RuntimeError(f"{self.label} ended with {self._process.returncode} before it was measured")
        return line


class Peer:
    """The running script of a peer.

    It runs if the environment names an interpreter for it, and the model if `model` is the variable that names one: the
    script's argument is its value. Otherwise it has no name and measures nothing; `missing` says why. It is kept to the
    class of CPUs that Quire's kernels use, and does not run if it cannot be.
    """

    def __init__(
        self,
        script: Path,
        variable: str,
        workload: Mapping[str, Any],
        label: str = "",
        model: str = "",
        arguments: Sequence[str] = (),
    ) -> None:
        """`arguments` follow the model's."""
        self.label = label or script.stem.partition("_")[0]  # the prefix of its rows' names
        self.name: str | None = None
        self.runs: list[Figures] = []
        left_out = incomparable(self.label, device_of(self.label))
        self.left_out = left_out is not None
        """Whether it cannot be compared in this class of CPUs."""
        reasons = (left_out, _unset(variable), _unset(model) if model else None)
        reason = next(filter(None, reasons), None)
        self.missing = f"{self.label} did not run: {reason}"
        self._worker: Worker | None = None
        if not reason:
            # In its input, because an argument of a process has at most 128 KiB.
            first = json.dumps(workload) + "\n"
            command: list[str | Path] = [
                os.environ[variable],
                script,
                *([os.environ[model]] if model else []),
                *arguments,
            ]
            self._worker = Worker(self.label, command, _environment(device_of(self.label)), first)
            self.name = self._worker.name

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End its process."""
        if self._worker:
            self._worker.close()

    def terms(self, work: str) -> dict[str, Terms]:
        """Return the peer's terms for the named work, by its label; none if it did not run."""
        return {self.label: self._worker.terms(work)} if self._worker else {}

    @property
    def cores_used(self) -> float | None:
        """How many cores it used in the last repetition: CPU seconds per second. None if unknown."""
        return self._worker.cores_used if self._worker else None

    def measure(self, workload: str = "") -> Figures | None:
        """Run one repetition of the named workload; return its figures if the peer is available."""
        if not self._worker:
            return None
        self.runs.append(self._worker.measure(workload))
        return self.runs[-1]

    def rows(self, benchmark: str, metrics: Sequence[str], runs: Sequence[Figures]) -> list[Row]:
        """Return the peer's figures, and Quire's over them: medians, or None if the peer did not run."""
        peer = self.name or self.missing
        rows = []
        for metric in metrics:
            theirs = [run[metric] for run in self.runs]
            ratios = [ours[metric] / their for ours, their in zip(runs, theirs, strict=self.name is not None)]
            rows.append(row(benchmark, f"{self.label}_{metric}", _median(theirs), "us", peer))
            rows.append(row(benchmark, f"{metric}_over_{self.label}", _median(ratios), "ratio", peer))
        return rows


def _unset(variable: str) -> str | None:
    """Return why a variable names no file or folder, None if it does."""
    path = os.environ.get(variable)
    if not path:
        return f"{variable} is not set"
    return None if Path(path).exists() else f"{variable} names {path}, which does not exist"


def _environment(device: str) -> dict[str, str]:
    """Return a peer's environment: its own defaults for threads, and the limits of a class of CPUs."""
    inherited = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    return inherited | limits_of(device)


def _median(values: Sequence[float]) -> float | None:
    return round(median(values), 3) if values else None
