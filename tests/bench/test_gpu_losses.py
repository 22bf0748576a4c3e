"""Tools, files and terminals that fail under `make gpu-check` and `make gpu-first`: nothing measured is lost."""

import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu_check import probe, run
from bench.gpu_check.budgets import BUDGETS, SECONDS, Deadline
from bench.gpu_check.calls import merged as results_of_calls
from bench.gpu_check.calls.budgets import CALLS
from bench.gpu_check.calls.merged import folder_of, merge
from bench.gpu_check.notes import Notes, Result
from bench.gpu_check.parts import counters, sanitizer
from bench.gpu_check.processes import END_SECONDS
from bench.gpu_check.tools.children import failures_in
from bench.report.results import write
from bench.report.targets import ROOT

STATE_SECONDS = 21.0  # of nvidia-smi until it is left alone
CPU = torch.device("cpu")
NOTE = '{{"row": {{"metric": "{}", "value": 1.0, "unit": "s", "peer": null, "target": null, "met": null}}}}'


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
    for line in (NOTE.format("a"), hostile, NOTE.format("b")):
        result.take(line + "\n")
    assert [row.metric for row in result.rows] == ["a", "b"]
    assert list(result.failures) == ["notes"]
    write("gpu", result.rows, 1, tmp_path, raw=result.raw, failures=result.failures)


def test_names_have_one_line() -> None:
    result = Result()
    result.take(NOTE.format("a\\nb") + "\n")
    result.take('{"failure": ["c\\nd", "e"]}\n')
    assert [row.metric for row in result.rows] == ["a b"]
    assert result.failures == {"c d": "e"}


def write_call(folder: Path, name: str, rows: dict[str, float | None], **more: Any) -> None:
    own = folder_of(1, folder)
    own.mkdir(exist_ok=True)
    listed = [{"metric": metric, "value": value} for metric, value in rows.items()]
    (own / name).write_text(json.dumps({"rows": listed, "raw": {}, "failures": {}} | more))


def test_a_run_keeps_the_file_of_each_earlier_one(tmp_path: Path) -> None:
    for _ in range(3):
        run.Check({}, 60.0, time.monotonic(), tmp_path, {}).run()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["gpu.json", "gpu.json.1", "gpu.json.2"]


def test_a_call_that_is_run_again_and_crashes_loses_no_row(tmp_path: Path) -> None:
    write_call(tmp_path, "gpu.json.9", {"a": 1, "b": 1, "c": 1})
    write_call(tmp_path, "gpu.json.10", {"b": 2, "c": 2}, failures={"old": "x"})
    write_call(tmp_path, "gpu.json", {"b": None, "c": 3}, failures={"part": "y"})
    assert merge(tmp_path) == []
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [(row["metric"], row["value"], row.get("file")) for row in found["rows"]] == [
        ("a", 1, "gpu.json.9"),
        ("b", 2, "gpu.json.10"),
        ("c", 3, None),
    ]
    assert found["failures"] == {"call 1, part": "y"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "rows: must be a list"),
        ("[]", "it is no object with rows"),
        ('{"rows": [{}], "raw": {}, "failures": {}}', "rows: each must be an object with a metric and a value"),
        ('{"rows": [], "raw": [], "failures": {}}', "raw: must be an object"),
        ('{"rows": [], "raw": {}, "failures": {}, "parts": 1}', "parts: must be an object"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
    ],
)
def test_a_file_of_another_shape_is_named_and_costs_no_other(text: str, reason: str, tmp_path: Path) -> None:
    write_call(tmp_path, "gpu.json", {"a": 1})
    folder_of(2, tmp_path).mkdir()
    for broken in (folder_of(2, tmp_path) / "gpu.json", tmp_path / "gpu.json"):
        broken.write_text(text)
    of_call, whole = merge(tmp_path)
    assert of_call.startswith(f"{folder_of(2, tmp_path) / 'gpu.json'}: {reason}")
    assert whole.startswith(f"{tmp_path / 'gpu.json'}: {reason}")
    assert [row["metric"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]] == ["a"]
    assert (tmp_path / "gpu.json.1").read_text() == text


def test_a_folder_in_place_of_the_merged_file_is_named_and_moved(tmp_path: Path) -> None:
    write_call(tmp_path, "gpu.json", {"a": 1})
    (tmp_path / "gpu.json").mkdir()
    assert merge(tmp_path) == [f"{tmp_path / 'gpu.json'}: Is a directory"]
    assert (tmp_path / "gpu.json").is_file()


def test_a_merge_that_cannot_write_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results_of_calls, "_write", full)
    write_call(tmp_path, "gpu.json", {"a": 1})
    assert merge(tmp_path) == [f"{tmp_path / 'gpu.json'}: No space left on device"]
    with pytest.raises(SystemExit, match="the results were not all merged"):
        run.Check({}, 60.0, time.monotonic(), tmp_path, {}).end(merge(tmp_path))


def test_parts_that_a_killed_call_did_not_end_are_failures(tmp_path: Path) -> None:
    write_call(tmp_path, "gpu.json", {}, parts={"a": "ended", "b": "running", "c": "not started"})
    merge(tmp_path)
    assert json.loads((tmp_path / "gpu.json").read_text())["failures"] == {
        "call 1, b": "the call was ended: running",
        "call 1, c": "the call was ended: not started",
    }


def test_an_ended_run_names_the_parts_that_did_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended:
        def __init__(self, command: list[str]) -> None:
            self.name = command[3]

        def follow(self, *_: object) -> None:
            if self.name == "b":
                sys.exit(128 + signal.SIGTERM)

    monkeypatch.setattr(run, "Part", Ended)
    with pytest.raises(SystemExit):
        run.Check(dict.fromkeys("abc", 1.0), 60.0, time.monotonic(), tmp_path, {}).run()
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["ended"] == "signal 15"
    assert found["parts"] == {"a": "ended", "b": "running", "c": "not started"}
    assert found["failures"] == {"b": "interrupted: signal 15", "c": "it never ran"}


@pytest.mark.parametrize("budgets", [BUDGETS, *CALLS.values()])
def test_a_run_whose_parts_all_run_over_and_hang_ends_within_ten_minutes(
    budgets: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    class Hanging:
        def __init__(self, command: list[str]) -> None:
            pass

        def follow(self, limit: float, _: object) -> str:
            now[0] += limit + END_SECONDS
            return "killed"

    def state() -> str:
        now[0] += STATE_SECONDS
        return probe.SILENT

    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run, "Part", Hanging)
    monkeypatch.setattr(probe, "state", state)
    check = run.Check(budgets, SECONDS, 0.0, tmp_path, {})
    check.run()
    assert SECONDS < now[0] < 600 - 15  # the start, and the summary, take some seconds
    assert list(check.result.raw.values()).count(probe.SILENT) == 1
    assert check.result.failures.keys() == budgets.keys()
    with pytest.raises(SystemExit) as ended:
        check.end()
    assert len(str(ended.value.code)) <= 130


def test_a_state_that_cannot_be_asked_for_costs_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> str:
        raise RuntimeError("no")

    monkeypatch.setattr(probe, "state", state)
    monkeypatch.setattr(run.sys, "executable", "/nowhere/python")
    check = run.Check({"a": 1.0, "b": 1.0}, 60.0, time.monotonic(), tmp_path, {})
    check.run()
    assert check.result.raw["gpu_after_a"] == "nvidia-smi does not answer: no"
    assert check.ended == "in order"


@pytest.mark.parametrize("shell", ["> /dev/full 2>&1", "2>&1 | true; exit ${PIPESTATUS[0]}", "2>&1 >&-"])
def test_a_call_whose_output_is_lost_ends_in_order(shell: str, tmp_path: Path) -> None:
    program = textwrap.dedent("""
        from bench.gpu_check.calls import __main__ as call
        from bench.gpu_check import run
        from bench.gpu_check.processes import Part
        lines = "import os, sys; from bench.gpu_check.processes import bear_lost_output; bear_lost_output()"
        lines += "; print('x' * 100_000, flush=True); os.write(int(sys.argv[-1]), (sys.argv[1] + os.linesep).encode())"
        run.Part = lambda command: Part([sys.executable, "-c", lines, ROW])
        call.CALLS[1] = {"machine": 60.0}
        call.main()
    """)
    file = tmp_path / "program.py"
    file.write_text(f"import sys\nROW = {NOTE.format('m')!r}\n{program}")
    command = f"{sys.executable} {file} 1 --dry --results {tmp_path} {shell}"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/protos"}
    assert subprocess.run(["bash", "-c", command], env=environment).returncode == 0
    assert [row["metric"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]] == ["m"]


def test_under_nohup_a_lost_terminal_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        run.end_on_signals()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is not before[signal.SIGTERM]
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@pytest.mark.parametrize(("dry", "expected"), [("0", False), ("", False), ("1", True)])
def test_only_dry_1_runs_dry(dry: str, expected: bool) -> None:
    made = subprocess.run(
        ["make", "-n", "gpu-check", f"DRY={dry}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ("--dry" in made.stdout) == expected
