"""`make gpu-first` and `make gpu-check` without a GPU, with older packages: small cases run every line of every part.

The three calls have all parts, so that none runs twice.
"""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_check.budgets import BUDGETS
from bench.gpu_check.calls.budgets import CALLS
from bench.gpu_check.calls.summary import predicted
from bench.gpu_check.parts import tests as suite
from bench.report.targets import targets
from tests.gpu_check.bare_environment import DOCUMENTED, closure, make_bare_environment

ROOT = Path(__file__).parents[2]
PATHS = f"{ROOT}:{ROOT / 'protos'}"
# The batch and the prompt of small cases, and those on a GPU.
ON_A_GPU = {"_b2_": ("_b32_", "_b256_"), "prompt_step_3": ("prompt_step_50", "prompt_step_240", "prompt_step_500")}
# Predicted rows of docs/benchmarking.md, each with a row of the results.
SAMPLER = {
    "256 rows, temperature": "temperature",
    "top-p and top-k": "top_k",
    "top-p of flat rows": "top_p_of_flat_rows",
    "penalties": "penalties",
}
# tests/bench/test_gpu_*.py cover failing parts, deadlines and activity without a kernel.
NOT_PARTS = {
    "__main__.py",
    "processes.py",
    "notes.py",
    "profiles.py",
    "run.py",
    "probe.py",
    "merged.py",
    "reports.py",
    "summary.py",
    "children.py",
}
# These run where gRPC is not too old: tests/bench/test_gpu_llama.py.
NOT_PARTS |= {"attached.py", "engine.py", "manager_process.py"}
SETTINGS = """
[run]
source = bench/gpu_check
parallel = true
patch = subprocess, _exit
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
def folder(tmp_path_factory: pytest.TempPathFactory, python: Path, older_packages: str) -> Path:
    """The results of the three calls and their covered lines."""
    folder = tmp_path_factory.mktemp("dry")
    (folder / "settings").write_text(SETTINGS.format(folder=folder))

    def call(number: int) -> None:
        options = ("--dry", "--results", str(folder))
        coverage(python, folder, older_packages, "run", "-m", "bench.gpu_check.calls", str(number), *options)

    # All at once, because their lengths differ.
    with ThreadPoolExecutor(len(CALLS)) as pool:
        list(pool.map(call, CALLS))
    coverage(python, folder, older_packages, "combine")
    coverage(python, folder, older_packages, "json", "-o", str(folder / "lines.json"))
    return folder


def coverage(python: Path, folder: Path, packages: str, command: str, *arguments: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{packages}:{PATHS}",
        # The runs are side by side.
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    line = [str(python), "-m", "coverage", command, f"--rcfile={folder / 'settings'}", *arguments]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def made(target: str, python: Path, packages: str, arguments: str) -> str:
    """Run a target of the Makefile without a GPU, and return what it printed."""
    line = ["make", *target.split(), "DRY=1", f"PYTHON={python}", f"ARGS={arguments}"]
    environment = {**os.environ, "PYTHONPATH": packages}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


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
    parts = {f"{name}.py" for call in CALLS.values() for name in call}
    assert parts | {"part.py"} <= {Path(name).name for name in files}


def test_every_part_succeeds_in_a_call_with_older_packages(folder: Path) -> None:
    found = result(folder)
    assert found["failures"] == {}
    assert {row["call"] for row in found["rows"]} == set(CALLS)
    assert set(BUDGETS) <= {name for call in CALLS.values() for name in call}
    installed = found["raw"]["versions"]
    assert (installed["triton"], installed["grpcio"]) == ("3.6.0", "1.80.0")
    assert (installed["transformers"], installed["protobuf"]) == ("5.17.0", "6.31.1")


def test_a_model_is_measured_with_the_core_where_grpc_is_too_old(folder: Path) -> None:
    found = result(folder)
    assert "Version" in found["raw"]["kv_manager"]["reason"]
    hosts = [row for row in found["rows"] if row["metric"].endswith("_host_milliseconds_per_step")]
    assert hosts
    assert {row["peer"] for row in hosts} == {found["raw"]["kv_manager"]["where"]}


def test_the_whole_check_runs_from_the_makefile(python: Path, older_packages: str, tmp_path: Path) -> None:
    made("gpu-check", python, older_packages, f"--parts ceilings --results {tmp_path}")
    assert "read_bandwidth" in {row["metric"] for row in result(tmp_path)["rows"]}


def test_results_of_calls_on_several_machines_are_merged_from_the_makefile(
    folder: Path, python: Path, older_packages: str
) -> None:
    before = result(folder)
    (folder / "gpu.json").unlink()
    made("gpu-first CALL=merge", python, older_packages, f"--results {folder}")
    assert result(folder) == before


def test_every_prediction_is_of_a_row_and_of_the_page(folder: Path) -> None:
    page = (ROOT / "docs" / "benchmarking.md").read_text().partition("### Predicted")[2]
    assert predicted().keys() <= names(folder)
    for value in predicted().values():
        assert value.removeprefix("below ") in page


def test_every_target_of_a_gpu_has_a_row(folder: Path) -> None:
    assert targets()["gpu"].keys() - {"title"} <= names(folder)


def names(folder: Path) -> set[str]:
    """The metrics, those of small batches and prompts also as on a GPU."""
    found = {row["metric"] for row in result(folder)["rows"]}
    for small, real in ON_A_GPU.items():
        found |= {metric.replace(small, one) for metric in found for one in real}
    return found


def test_each_predicted_row_of_the_sampler_is_measured(folder: Path) -> None:
    page = (ROOT / "docs" / "benchmarking.md").read_text()
    metrics = {row["metric"] for row in result(folder)["rows"]}
    for words, name in SAMPLER.items():
        assert f"| sampler, {words} |" in page
        assert f"sampler_{name}_milliseconds" in metrics
    assert page.count("| sampler, ") == len(SAMPLER)
