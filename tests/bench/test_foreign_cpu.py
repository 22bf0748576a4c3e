"""CPU time of other processes."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.report.foreign_cpu import ForeignCpu, foreign_seconds

BUSY = "import sys, time\nend = time.process_time() + float(sys.argv[1])\nwhile time.process_time() < end: pass"
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def burn(seconds: float) -> None:
    subprocess.run([sys.executable, "-c", BUSY, str(seconds)], check=True)


@contextmanager
def other_program() -> Iterator[int]:
    """A process that does nothing, as the root of another program's tree."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.communicate()


def test_time_of_own_children_is_not_foreign_and_that_of_others_is() -> None:
    with other_program() as other:
        own, seen_by_the_other = foreign_seconds(), foreign_seconds(root=other)
        assert own is not None
        assert seen_by_the_other is not None
        burn(0.5)
        after = foreign_seconds(root=other)
        assert after is not None
        assert after - seen_by_the_other >= 0.45


def test_the_worst_repetition_counts() -> None:
    seconds, moments = iter([1.0, 1.2, 5.0, 5.1]), iter([0.0, 2.0, 10.0, 12.0])
    foreign = ForeignCpu(lambda: next(seconds), lambda: next(moments))
    assert foreign.most is None
    for _ in range(2):
        with foreign.watched():
            pass
    assert foreign.most == 0.1


def test_without_proc_nothing_is_measured(tmp_path: Path) -> None:
    assert foreign_seconds(tmp_path) is None
    foreign = ForeignCpu(lambda: None)
    with foreign.watched():
        pass
    assert foreign.most is None


def test_a_process_is_foreign_unless_it_descends_from_this_one(tmp_path: Path) -> None:
    # A root, its child with a strange name, a grandchild, and a stranger; times are in hundredths of a second.
    processes = {10: ("root", 1, 100), 11: ("a) (b", 10, 200), 12: ("leaf", 11, 400), 20: ("stranger", 1, 800)}
    for pid, (name, parent, ticks) in processes.items():
        (tmp_path / str(pid)).mkdir()
        line = f"{pid} ({name}) S {parent} 0 0 0 0 0 0 0 0 0 {ticks} 0 0 0 20 0 1"
        (tmp_path / str(pid) / "stat").write_text(line)
    assert foreign_seconds(tmp_path, root=10) == 8.0
    assert foreign_seconds(tmp_path, root=11) == 9.0
