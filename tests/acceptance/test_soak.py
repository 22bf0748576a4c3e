"""A soak fails on a gateway that keeps its requests, and passes without; neither changes committed results."""

import subprocess
import sys

import pytest

from bench.report.targets import RESULTS, ROOT

# Engines compute nothing, so that thousands of requests fit into a few minutes.
COMMAND = [sys.executable, "-m", "bench.soak", "4", "--null-engines"]


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def _results_stay() -> object:
    before = {file: file.stat().st_mtime_ns for file in RESULTS.rglob("soak.json")}
    yield
    assert {file: file.stat().st_mtime_ns for file in RESULTS.rglob("soak.json")} == before


def test_a_soak_without_a_leak_passes() -> None:
    done = soak()
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.endswith("passed\n")


def test_a_soak_fails_on_a_gateway_that_keeps_every_request() -> None:
    done = soak("--gateway-module", "tests.running.leaky_gateway")
    assert done.returncode == 1
    assert "gateway-a" in done.stdout
    assert "bytes a request, more than the 256 that are allowed" in done.stdout
    assert "missed: gateway_bytes_per_request" in done.stdout
    assert done.stdout.endswith("failed\n")
