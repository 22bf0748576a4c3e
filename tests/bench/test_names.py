"""`python -m bench NAME` finds every benchmark, and runs it as a command."""

import subprocess
import sys

import pytest

from bench.__main__ import module_of
from bench.report.targets import RESULTS, ROOT, targets

# What others than benchmarks have measured.
OTHERS = {"gpu", "acceptance"}


def test_every_name_with_targets_or_results_has_a_benchmark() -> None:
    names = targets().keys() | {file.stem for file in RESULTS.iterdir()}
    assert OTHERS - {"gpu"} <= names
    assert {module_of(name).rpartition(".")[2] for name in names - OTHERS} == names - OTHERS


def test_benchmark_names_are_unique() -> None:
    files = [
        file.stem for room in ("blocks", "engine", "serving") for file in (ROOT / "bench" / room).glob("[a-z]*.py")
    ]
    assert len(files) == len(set(files)) > 15


@pytest.mark.parametrize("name", ["nothing", "", "blocks", "../kv", "loads.peer", "__main__"])
def test_an_unknown_benchmark_is_refused_with_the_folder_of_all(name: str) -> None:
    with pytest.raises(LookupError, match=r"there is no benchmark .* in bench/blocks, bench/engine, bench/serving"):
        module_of(name)


def test_arguments_go_to_the_benchmark() -> None:
    command = [sys.executable, "-m", "bench", "kv", "compute", "0.01"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    command[3:] = ["nothing"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("there is no benchmark 'nothing'")
