"""A compiler ends with the process that runs it."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from engine.native.compiler import run_compiler

SECONDS = 60
RUN = f"""
import sys
from pathlib import Path
from engine.native.compiler import run_compiler
run_compiler(sys.argv[2:], Path(sys.argv[1]), {SECONDS})
"""


def test_status_and_errors_are_those_of_the_compiler(tmp_path: Path) -> None:
    assert run_compiler(["sh", "-c", "echo wrong >&2; exit 3"], tmp_path, SECONDS) == (3, "wrong\n")
    assert run_compiler(["true"], tmp_path, SECONDS) == (0, "")
    assert tmp_path.exists()


def test_a_compiler_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_compiler(["sleep", str(SECONDS)], tmp_path / "unfinished", 0.01)


def test_a_compiler_ends_with_its_process_and_its_folder_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "kernels" / "unfinished"
    folder.mkdir(parents=True)
    compiler = ["sh", "-c", f"sleep {SECONDS} & echo started > {folder}/output; wait"]
    process = subprocess.Popen([sys.executable, "-c", RUN, str(folder), *compiler])
    parent = psutil.Process(process.pid)
    while not (folder / "output").exists():
        assert process.poll() is None
    started = parent.children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=SECONDS / 2)
    assert len(started) >= 3
    assert not alive
    assert not folder.parent.exists()
