"""Rows, their targets, and result files."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.report import results
from bench.report.results import publish, row
from bench.report.targets import ROOT, device_of, met, targets

# Modules that a machine with a GPU may lack.
BARE = """
import sys
from pathlib import Path

for name in ("rich", "matplotlib", "psutil", "numpy", "torch"):
    sys.modules[name] = None
from bench.report import results

results.RESULTS = Path(sys.argv[1])
assert list(results.track([1, 2], "counting")) == [1, 2]
results.publish("cpu", [results.row("cpu", "b1_of_its_goal", 1.5, "ratio", "a peer")], 3, seconds=[0.5])
"""


def test_a_value_meets_its_target_on_the_right_side_only() -> None:
    less, more = {"target": 15.0, "better": "less"}, {"target": 15.0, "better": "more"}
    at_most = {"target": 15.0, "better": "at most"}
    assert met(15.0, at_most)
    assert not met(15.1, at_most)
    assert met(14.9, less)
    assert not met(15.0, less)
    assert met(15.0, more)
    assert not met(14.9, more)


def test_an_unmeasured_target_is_not_met_and_a_row_without_target_is_neither() -> None:
    assert met(None, {"target": 1.0, "better": "less"}) is False
    assert met(3.0, None) is None


def test_a_row_has_the_target_of_the_file() -> None:
    assert row("demo", "first_token_seconds", 3.0, "s").target == 4.0
    assert row("demo", "first_token_seconds", 30.0, "s").met is False
    assert row("demo", "a_metric_without_target", 1.0, "s").target is None


def test_every_target_has_a_direction_and_belongs_to_a_benchmark_with_a_title() -> None:
    for benchmark, group in targets().items():
        assert group.pop("title"), benchmark
        for metric, target in group.items():
            assert set(target) - {"headline"} == {"words", "target", "better"}, metric
            assert met(target["target"], target) is (target["better"] != "less")


def test_a_result_holds_its_date_the_load_of_the_machine_and_the_given_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    publish("demo", [row("demo", "first_token_seconds", 3.0, "s")], 2, runs=[2.5, 3.5])
    result = json.loads((tmp_path / device_of("demo") / "demo.json").read_text())
    assert datetime.fromisoformat(result["started"]) < datetime.now(UTC)
    assert [len(result["load"][moment]) for moment in ("start", "end")] == [3, 3]
    assert result["runs"] == [2.5, 3.5]
    assert result["hardware"]["cores"] >= 1
    assert result["rows"][0]["met"] is True
    assert "first_token_seconds" in capsys.readouterr().out


def test_a_machine_without_extras_prints_a_plain_table_and_no_picture(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "cpu"
    assert lines[1].split() == ["metric", "value", "unit", "peer", "target", "met"]
    assert lines[2].split("  ")[0] == "b1_of_its_goal"
    assert len(lines) == 3
    assert json.loads((tmp_path / device_of("cpu") / "cpu.json").read_text())["seconds"] == [0.5]
