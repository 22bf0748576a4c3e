"""`make gpu-check` without a GPU: small cases run every line of every part."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_check.budgets import BUDGETS
from bench.gpu_check.parts import tests as suite
from bench.report.targets import targets
from tests.gpu_check.bare_environment import DOCUMENTED, closure, make_bare_environment

ROOT = Path(__file__).parents[2]
PATHS = f"{ROOT}:{ROOT / 'protos'}"
BATCHES = {"_b2_": ("_b32_", "_b256_")}  # the batch of small cases, and the batches on a GPU
# Predicted rows of docs/benchmarking.md, each with a row of the results.
SAMPLER = {
    "256 rows, temperature": "temperature",
    "top-p and top-k": "top_k",
    "top-p of flat rows": "top_p_of_flat_rows",
    "penalties": "penalties",
}
# tests/bench/test_gpu_*.py cover failing parts, deadlines and activity without a kernel.
NOT_PARTS = {"__main__.py", "processes.py", "notes.py", "profiles.py"}
SETTINGS = """
[run]
source = bench/gpu_check
parallel = true
patch = subprocess
data_file = {folder}/lines
[report]
exclude_lines =
    pragma: no cover - CUDA
    if deadline.passed
    if found and deadline.passed
    except Exception as failure
    if not counts
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment without Quire and packages that the page does not name."""
    return make_bare_environment(tmp_path_factory.mktemp("bare"), "coverage")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, python: Path) -> Path:
    """The dry run's results and its covered lines."""
    folder = tmp_path_factory.mktemp("dry")
    (folder / "settings").write_text(SETTINGS.format(folder=folder))
    coverage(python, folder, "run", "-m", "bench.gpu_check", "--dry", "--results", str(folder))
    coverage(python, folder, "combine")
    coverage(python, folder, "json", "-o", str(folder / "lines.json"))
    return folder


def coverage(python: Path, folder: Path, command: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": PATHS}
    line = [
        str(python),
        "-m",
        "coverage",
        command,
        f"--rcfile={folder / 'settings'}",
        *arguments,
    ]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gpu.json").read_text())
    return found


@pytest.mark.parametrize(("files", "which"), suite.FULL, ids=[which for _, which in suite.FULL])
def test_each_part_of_the_suite_selects_tests(python: Path, tmp_path: Path, files: tuple[str, ...], which: str) -> None:
    line = [str(python), "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files, "-k", which]
    line += ["-W", "ignore::pytest.PytestConfigWarning"]
    environment = {**os.environ, "QUIRE_CACHE": str(tmp_path), "PYTHONPATH": PATHS}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_environment_has_what_the_page_names_and_nothing_of_quire() -> None:
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    assert f"a Python with {', '.join(DOCUMENTED[:-1])} and {DOCUMENTED[-1]}." in page
    assert (
        closure(DOCUMENTED)
        .keys()
        .isdisjoint({"quire", "grpcio-health-checking", "googleapis-common-protos", "prometheus-client"})
    )


@pytest.mark.timeout(1800)
def test_every_line_of_a_part_runs_without_a_gpu(folder: Path) -> None:
    files = json.loads((folder / "lines.json").read_text())["files"]
    missing = {Path(name).name: file["missing_lines"] for name, file in files.items() if file["missing_lines"]}
    assert {name: lines for name, lines in missing.items() if name not in NOT_PARTS} == {}
    assert {f"{name}.py" for name in (*BUDGETS, "part", "manager_process")} <= {Path(name).name for name in files}


def test_every_part_succeeds(folder: Path) -> None:
    assert result(folder)["failures"] == {}


def test_every_target_of_a_gpu_has_a_row(folder: Path) -> None:
    metrics = {row["metric"] for row in result(folder)["rows"]}
    for small, real in BATCHES.items():
        metrics |= {metric.replace(small, one) for metric in metrics for one in real}
    assert targets()["gpu"].keys() - {"title"} <= metrics


def test_each_predicted_row_of_the_sampler_is_measured(folder: Path) -> None:
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    metrics = {row["metric"] for row in result(folder)["rows"]}
    for words, name in SAMPLER.items():
        assert f"| sampler, {words} |" in page
        assert f"sampler_{name}_milliseconds" in metrics
    assert page.count("| sampler, ") == len(SAMPLER)
