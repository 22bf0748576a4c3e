"""CPU time of the machine's other processes while a repetition runs. The load average counts the benchmark itself.

Needs Linux' /proc; elsewhere nothing is measured.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

_PROC = Path("/proc")
_PARENT, _GROUP, _TIMES = 1, 2, slice(11, 15)  # of /proc/PID/stat, counted from the state


class ForeignCpu:
    """The largest share of a core that processes outside of this one's tree took, over all repetitions so far."""

    def __init__(self, read: Callable[[], float | None] | None = None, clock: Callable[[], float] = monotonic) -> None:
        """`read` returns the seconds so far of all processes outside of the tree, by default from /proc."""
        self._read = read or foreign_seconds
        self._clock = clock
        self.most: float | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure a repetition."""
        before, begun = self._read(), self._clock()
        yield
        after, seconds = self._read(), self._clock() - begun
        if before is not None and after is not None and seconds:
            self.most = round(max(self.most or 0.0, (after - before) / seconds), 3)


def foreign_seconds(proc: Path = _PROC, root: int | None = None) -> float | None:
    """Return the CPU seconds so far of all processes but `root` and its descendants, those of ended children included.

    The default of `root` is this process. None without /proc.
    """
    stats = _stats(proc)
    own = root or os.getpid()
    return _seconds([fields for pid, fields in stats.items() if not _descends(pid, own, stats)]) if stats else None


def group_seconds(group: int, proc: Path = _PROC) -> float | None:
    """Return the CPU seconds so far of all processes of a process group. None without /proc."""
    stats = _stats(proc)
    return _seconds([fields for fields in stats.values() if int(fields[_GROUP]) == group]) if stats else None


def _stats(proc: Path) -> dict[int, list[str]]:
    """Return the fields of each process."""
    return {int(folder.name): found for folder in proc.glob("[0-9]*") if (found := _fields(folder / "stat"))}


def _seconds(processes: Iterable[list[str]]) -> float:
    """Return the CPU seconds of processes. The time of an ended one is its parent's, so that the sum grows steadily."""
    return sum(sum(map(int, fields[_TIMES])) for fields in processes) / os.sysconf("SC_CLK_TCK")


def _descends(pid: int, root: int, stats: Mapping[int, list[str]]) -> bool:
    while pid != root and pid in stats:
        pid = int(stats[pid][_PARENT])
    return pid == root


def _fields(path: Path) -> list[str]:
    """Return the fields after the name, which may have spaces; none of a process that has ended."""
    try:
        return path.read_text().rpartition(")")[2].split()
    except OSError:
        return []
