"""How many threads an engine computes with: those of its cores, within the quota of a container.

A container limited to two cores of a large machine still reports all of its cores: it may use each of them for a part
of the time. Threads of a step wait for each other, so more of them than the quota permits would mostly wait.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

_PROCESS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def threads_within_quota(threads: int, process: Path = _PROCESS, root: Path = _ROOT) -> int:
    """Return the number of threads, at most the whole cores of the quota and at least 1.

    `process` lists the process's control groups, which lie under `root`. See "CPU Interface Files" in the kernel's
    documentation of control groups: https://docs.kernel.org/admin-guide/cgroup-v2.html
    """
    return max(1, min([threads, *(int(cores) for cores in _quotas(process, root))]))


def threads_of_rank(ranks: int) -> int:
    """Return the threads of one of several ranks that share this machine."""
    return max(1, threads_within_quota(len(os.sched_getaffinity(0))) // ranks)


def _quotas(process: Path, root: Path) -> Iterator[float]:
    """Yield the cores of each quota of the process's control groups and the groups above them."""
    with suppress(OSError):
        for line in process.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                yield from _of_groups(root, path, _of_version_2)
            elif "cpu" in controllers.split(","):
                yield from _of_groups(root / controllers, path, _of_version_1)
                yield from _of_groups(root / "cpu", path, _of_version_1)


def _of_groups(mounted: Path, path: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    """Yield the quotas of a group and those above it. In a container the mounted folder may be its own group."""
    group = mounted / path.lstrip("/")
    for folder in dict.fromkeys((group, *group.parents)):
        if folder.is_relative_to(mounted):
            with suppress(OSError, ValueError, ZeroDivisionError):  # missing, or no quota
                if cores := read(folder):
                    yield cores


def _of_version_2(folder: Path) -> float | None:
    quota, period = (folder / "cpu.max").read_text().split()
    return None if quota == "max" else int(quota) / int(period)


def _of_version_1(folder: Path) -> float | None:
    quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return quota / period if quota > 0 else None  # -1: none
