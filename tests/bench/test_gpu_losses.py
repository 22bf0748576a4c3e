"""Tools, files and terminals that fail under `make gpu-check` and `make gpu-first`: nothing measured is lost."""

import io
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes, Result
from bench.gpu_check.parts import counters, sanitizer
from bench.gpu_check.tools.children import failures_in
from bench.report.results import write

CPU = torch.device("cpu")
ROW = '{{"row": {{"metric": "{}", "value": 1.0, "unit": "s", "peer": null, "target": null, "met": null}}}}'


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


@pytest.mark.parametrize(
    "hostile",
    [
        '{"raw": ["deep", ' + "[" * 900 + "]" * 900 + "]}",
        '{"raw": ["deeper", ' + "[" * 100_000 + "]" * 100_000 + "]}",
        '{"raw": [[], 1]}',
        '{"raw": 5}',
        '{"failure": ["part", 5]}',
        '{"failure": ["part"]}',
        '{"row": {"metric": [1], "value": 1, "unit": "s", "peer": null, "target": null, "met": null}}',
        '{"row": {"metric": "m", "value": "1", "unit": "s", "peer": null, "target": null, "met": null}}',
        '{"row": {"metric": "m", "value": 1' + "0" * 400 + ', "unit": "s", "peer": null, "target": null, "met": null}}',
        "[]",
        "null",
    ],
)
def test_a_line_of_wrong_types_costs_itself_only(hostile: str, tmp_path: Path) -> None:
    result = Result()
    for line in (ROW.format("a"), hostile, ROW.format("b")):
        result.take(line + "\n")
    assert [row.metric for row in result.rows] == ["a", "b"]
    assert list(result.failures) == ["notes"]
    write("gpu", result.rows, 1, tmp_path, raw=result.raw, failures=result.failures)


def test_names_have_one_line() -> None:
    result = Result()
    result.take(ROW.format("a\\nb") + "\n")
    result.take('{"failure": ["c\\nd", "e"]}\n')
    assert [row.metric for row in result.rows] == ["a b"]
    assert result.failures == {"c d": "e"}
