"""The stages of a start: seconds and memory of each, and which one failed."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from bench.gpu_check.notes import Notes

Result = TypeVar("Result")
_MIB = 1 << 20


class Memory(NamedTuple):
    """Mebibytes: torch's tensors and what it reserves for them, what the device has free, and the host's.

    The host's is that of this process, without mapped files.
    """

    allocated: float
    reserved: float
    free: float
    host: float

    @classmethod
    def read(cls, device: torch.device) -> "Memory":
        """Read the memory of a GPU and of this process."""
        sizes = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        free, _ = torch.cuda.mem_get_info(device)
        return cls(*(round(size / _MIB, 1) for size in (*sizes, free, _host_bytes())))


def _host_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


class Reading(NamedTuple):
    """Seconds of the monotonic clock, and the memory then."""

    at: float
    memory: Memory

    @classmethod
    def now(cls, device: torch.device) -> "Reading":
        """Read both once the GPU has done all its work."""
        torch.cuda.synchronize(device)
        return cls(time.monotonic(), Memory.read(device))


@dataclass
class AssemblyStage:
    """A stage of an assembly: its begin, its end, its log, and whether it succeeded."""

    begun: Reading
    ended: Reading
    records: list[logging.LogRecord] = field(default_factory=list)
    outcome: "Future[None]" = field(default_factory=Future)

    @classmethod
    def beginning(cls, reading: Reading) -> "AssemblyStage":
        """Return a stage that begins."""
        return cls(reading, reading)

    @property
    def warnings(self) -> list[str]:
        """What its log warns of."""
        return [one.getMessage() for one in self.records if one.levelno >= logging.WARNING]

    def end(self, reading: Reading) -> None:
        """End it with success."""
        self.ended = reading
        self.outcome.set_result(None)


class Assembly(logging.Handler):
    """Follows the stages of an assembly, and their warnings, by the records of the engine's log."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(logging.INFO)
        self._device = device
        self.stages = {"settings": AssemblyStage.beginning(Reading.now(device))}

    def emit(self, record: logging.LogRecord) -> None:
        """Begin the stage that a record names; keep the record."""
        if stage := getattr(record, "stage", None):
            reading = Reading.now(self._device)
            self._latest.end(reading)
            self.stages[stage] = AssemblyStage.beginning(reading)
        self._latest.records.append(record)

    def run(self, assemble: Callable[[], Result]) -> Result | None:
        """Assemble, and return the result; None after a failure, which is that of its stage."""
        with self._following(logging.getLogger("quire.engine")):
            try:
                result = assemble()
                self._latest.end(Reading.now(self._device))
                return result
            except Exception as failure:
                self._latest.outcome.set_exception(failure)
                return None

    @property
    def _latest(self) -> AssemblyStage:
        return next(reversed(self.stages.values()))

    @contextmanager
    def _following(self, log: logging.Logger) -> Iterator[None]:
        level = log.level
        log.setLevel(logging.INFO)
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)
            log.setLevel(level)


class Stages:
    """Runs the stages of one start, and writes the seconds and the memory of each."""

    def __init__(self, name: str, notes: Notes, device: torch.device) -> None:
        self._name = name
        self._notes = notes
        self._device = device
        self._done: set[str] = set()
        self._memory: dict[str, object] = {}

    def run(self, stage: str, work: Callable[[], object], needs: Sequence[str] = ()) -> None:
        """Run a stage, unless one that it needs has failed, or did not run itself."""
        with self._notes.kept(f"{self._name}, {stage}"):
            missing = [one for one in needs if one not in self._done]
            assert not missing, f"not run, because {missing[0]} failed"
            begun = Reading.now(self._device)
            work()
            self._note(stage, begun, Reading.now(self._device))
            self._done.add(stage)

    def take(self, assembly: Assembly, stages: Sequence[str]) -> None:
        """Take over these stages of an assembly. A warning in its log is a failure too."""
        latest = next(reversed(assembly.stages))
        for stage in dict.fromkeys((*assembly.stages, *stages)):
            with self._notes.kept(f"{self._name}, {stage}"):
                assert stage in assembly.stages, f"not run, because {latest} failed"
                found = assembly.stages[stage]
                found.outcome.result(timeout=0)
                self._note(stage, found.begun, found.ended)
                self._done.add(stage)
                assert not found.warnings, "; ".join(found.warnings)

    def row(self, metric: str, value: float, unit: str) -> None:
        """Write a row of this start."""
        self._notes.row(f"{self._name}_{metric}", value, unit)

    def _note(self, stage: str, begun: Reading, ended: Reading) -> None:
        self._memory[stage] = {"before": begun.memory._asdict(), "after": ended.memory._asdict()}
        self._notes.raw(f"{self._name}_memory", self._memory)
        self.row(f"{stage}_seconds", round(ended.at - begun.at, 3), "s")
        self.row(f"free_after_{stage}_mib", ended.memory.free, "MiB")
