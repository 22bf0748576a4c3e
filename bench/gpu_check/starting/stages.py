"""The stages of a start: seconds and memory of each, and which one failed."""

import logging
import time
from collections.abc import Callable, Sequence
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


class Moment(NamedTuple):
    """Seconds of the monotonic clock, and the memory then."""

    at: float
    memory: Memory


class Assembly(logging.Handler):
    """Notes when each stage of an assembly begins, from the records of its log that name one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(logging.INFO)
        self._device = device
        self._begun: dict[str, Moment] = {}
        self._failure: Exception | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Note the stage that begins."""
        if stage := getattr(record, "stage", None):
            self._begun[stage] = self._now()

    def run(self, assemble: Callable[[], Result]) -> Result | None:
        """Assemble, and return the result; None after a failure, which is that of its stage."""
        log = logging.getLogger("quire.engine")
        level = log.level
        log.addHandler(self)
        log.setLevel(logging.INFO)
        try:
            return assemble()
        except Exception as failure:
            self._failure = failure
            return None
        finally:
            log.setLevel(level)
            log.removeHandler(self)

    def stage(self, name: str) -> tuple[Moment, Moment]:
        """Return begin and end of a stage. Raises the failure of the assembly if this is its stage."""
        stages = list(self._begun)
        assert name in stages, f"not run: the start failed in the stage {stages[-1] if stages else 'settings'}"
        place = stages.index(name)
        if self._failure and name == stages[-1]:
            raise self._failure
        return self._begun[name], self._begun[stages[min(place + 1, len(stages) - 1)]]

    def _now(self) -> Moment:
        torch.cuda.synchronize(self._device)
        return Moment(time.monotonic(), Memory.read(self._device))


class Stages:
    """Runs the stages of one start, and writes the seconds and the memory of each."""

    def __init__(self, name: str, notes: Notes, device: torch.device) -> None:
        self._name = name
        self._notes = notes
        self._device = device
        self._failed: set[str] = set()
        self._memory: dict[str, object] = {}

    def run(self, stage: str, work: Callable[[], Result], needs: Sequence[str] = ()) -> Result | None:
        """Run a stage; return None if it failed, or if one that it needs has failed."""
        begun = Moment(time.monotonic(), Memory.read(self._device))
        with self._notes.kept(f"{self._name}, {stage}"):
            self._failed.add(stage)
            missing = [one for one in needs if one in self._failed]
            assert not missing, f"not run, because {missing[0]} failed"
            result = work()
            torch.cuda.synchronize(self._device)
            self.note(stage, begun, Moment(time.monotonic(), Memory.read(self._device)))
            self._failed.remove(stage)
            return result
        return None

    def take(self, stage: str, assembly: Assembly) -> None:
        """Take over a stage of an assembly."""
        with self._notes.kept(f"{self._name}, {stage}"):
            self._failed.add(stage)
            self.note(stage, *assembly.stage(stage))
            self._failed.remove(stage)

    def row(self, metric: str, value: float, unit: str) -> None:
        """Write a row of this start."""
        self._notes.row(f"{self._name}_{metric}", value, unit)

    def note(self, stage: str, begun: Moment, ended: Moment) -> None:
        """Write the seconds and the memory of a stage."""
        self._memory[stage] = {"before": begun.memory._asdict(), "after": ended.memory._asdict()}
        self._notes.raw(f"{self._name}_memory", self._memory)
        self.row(f"{stage}_seconds", round(ended.at - begun.at, 3), "s")
        self.row(f"free_after_{stage}_mib", ended.memory.free, "MiB")
