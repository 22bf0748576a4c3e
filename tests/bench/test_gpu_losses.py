"""Tools, files and terminals that fail under `make gpu-check` and `make gpu-first`: nothing measured is lost."""

import io
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes
from bench.gpu_check.parts import counters, sanitizer
from bench.gpu_check.tools.children import failures_in

CPU = torch.device("cpu")


def tool(folder: Path, script: str) -> str:
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("echo boom; exit 3", "it ended with 3: boom"),
        ("echo 'ERROR SUMMARY: 0 errors'; exit 3", "it ended with 3: ERROR SUMMARY: 0 errors"),
        ("kill -s KILL $$", "it ended with -9: it printed nothing"),
        ("echo garbage", "it printed no summary of errors: garbage"),
        ("echo 'ERROR SUMMARY: 2 errors'", "2 errors: see raw"),
        ("echo 'ERROR SUMMARY: 0 errors'", None),
    ],
)
def test_a_sanitizer_that_fails_or_reports_nothing_is_a_failure(
    script: str, failure: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sanitizer, "path_of", lambda _: tool(tmp_path, script))
    written = io.StringIO()
    sanitizer.measure(sanitizer.SMALL, CPU, Notes(written), Deadline(time.monotonic() + 60))
    expected = {} if failure is None else {"sanitizer, memcheck_of_recorded_steps": f"AssertionError: {failure}"}
    assert failures_in(written.getvalue()) == expected


@pytest.mark.parametrize(
    ("script", "failure"),
    [("echo boom; exit 3", "it ended with 3: boom"), ("echo garbage", "it printed no counters: garbage")],
)
def test_a_profiler_that_fails_or_prints_no_counters_is_a_failure(
    script: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "path_of", lambda _: tool(tmp_path, script))
    with pytest.raises(AssertionError, match=failure):
        counters.measure(counters.SMALL, CPU, Notes(io.StringIO()), Deadline(time.monotonic() + 60))
