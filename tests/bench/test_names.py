"""Names of benchmarks."""

import subprocess
import sys

import pytest

from bench.__main__ import main, module_of
from bench.report.targets import RESULTS, ROOT, targets

# Results of other programs.
OTHERS = {"gpu", "acceptance", "amplification", "last_green", "papers", "soak"}


def test_every_name_with_targets_or_results_has_a_benchmark() -> None:
    names = targets().keys() | {file.stem for file in RESULTS.rglob("*.json*")}
    assert OTHERS - {"gpu", "papers"} <= names
    assert {module_of(name).rpartition(".")[2] for name in names - OTHERS} == names - OTHERS


def test_benchmark_names_are_unique() -> None:
    folders = [ROOT / "bench" / folder for folder in ("blocks", "engine", "serving")]
    files = [file.stem for folder in folders for file in folder.glob("[a-z]*.py")]
    assert len(files) == len(set(files)) > 15


@pytest.mark.parametrize("name", ["nothing", "", "blocks", "../kv", "loads.peer", "__main__"])
def test_an_unknown_benchmark_is_refused_with_the_folder_of_all(name: str) -> None:
    with pytest.raises(LookupError, match=r"no benchmark .* in bench/blocks, bench/engine, bench/serving"):
        module_of(name)


def test_the_benchmark_gets_the_arguments() -> None:
    command = [sys.executable, "-m", "bench", "overload", "a minute"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("could not convert string to float: 'a minute'\n")


def test_an_unknown_benchmark_is_an_error_of_the_command() -> None:
    with pytest.raises(SystemExit, match=r"^no benchmark 'nothing'"):
        main("nothing")
