"""Runs a command as on a slower or faster machine: `python -m tests.at_speed half pytest ...`.

`half` gives the command and its children half of the processors' time, by a control group; that takes root and a
writable cpu controller. `double` shrinks the tiny models, so that an engine's steps take half of the time or less.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

# Read by tests/tiny_models.py.
SMALLEST_MODELS = "QUIRE_TESTS_SMALLEST_MODELS"

_PERIOD_MICROSECONDS = 20_000
_GROUP = f"quire-half-speed-{os.getpid()}"
# Paths and quota files of the cpu controller, in the first and second version of control groups.
_ROOTS = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))


@contextmanager
def half_speed() -> Iterator[Path]:
    """Make a control group with half of this machine's processor time."""
    quota = (os.cpu_count() or 1) * _PERIOD_MICROSECONDS // 2
    root = next((root for root in _ROOTS if os.access(root / "cgroup.procs", os.W_OK)), None)
    if root is None:
        raise SystemExit("cannot make a control group: that takes root and a writable cpu controller")
    group = root / _GROUP
    group.mkdir()
    try:
        if (group / "cpu.cfs_quota_us").exists():
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        elif (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_MICROSECONDS}")
        else:
            raise SystemExit(f"{root} has no cpu controller")
        yield group
    finally:
        _close(group)


def _close(group: Path) -> None:
    """Move remaining processes to the parent group, so that the group can be removed."""
    for process in (group / "cgroup.procs").read_text().split():
        try:
            (group.parent / "cgroup.procs").write_text(process)
        except OSError:
            continue  # it has ended
    group.rmdir()


def run(speed: str, command: Sequence[str]) -> int:
    if speed == "double":
        return _status(command, os.environ | {SMALLEST_MODELS: "1"})
    with half_speed() as group:
        join_first = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))
        return _status((*join_first, *command), os.environ.copy())


def _status(command: Sequence[str], environment: dict[str, str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command receives it too, and exits
    return subprocess.run(("env", "--default-signal=INT", *command), env=environment, check=False).returncode


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in ("half", "double"):
        raise SystemExit("usage: python -m tests.at_speed half|double COMMAND...")
    raise SystemExit(run(sys.argv[1], sys.argv[2:]))
