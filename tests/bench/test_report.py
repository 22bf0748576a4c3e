"""Rows, their targets, and result files."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.report import results
from bench.report.results import in_turn, print_rows, publish, row
from bench.report.targets import ROOT, device_of, targets
from bench.report.terms import Terms, UnequalTerms
from bench.report.verdict import MEETS, goal

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


def test_a_row_has_the_target_of_the_file() -> None:
    assert row("demo", "first_token_seconds", 3.0, "s").target == 4.0
    assert row("demo", "first_token_seconds", 30.0, "s").met is False
    assert row("demo", "a_metric_without_target", 1.0, "s").target is None


def test_every_target_has_a_direction_and_belongs_to_a_benchmark_with_a_title() -> None:
    for benchmark, group in targets().items():
        assert group.pop("title"), benchmark
        for metric, target in group.items():
            assert set(target) - {"headline"} == {"words", "target", "better"}, metric
            assert target["better"] in MEETS, metric


def test_a_row_whose_sides_differ_is_refused_unless_its_name_says_so() -> None:
    sides = {"quire": Terms(weights="int4", work="B=8"), "vllm": Terms(weights="bfloat16", work="B=8")}
    with pytest.raises(UnequalTerms, match="b8_over_vllm: weights is int4 of quire, but bfloat16 of vllm"):
        row("cpu", "b8_over_vllm", 3.0, "ratio", "vLLM", terms=sides)
    assert row("cpu", "b8_int4_over_vllm", 3.0, "ratio", "vLLM", terms=sides).terms == sides


def test_a_written_row_has_its_commit_its_code_its_terms_and_its_null_interval(tmp_path: Path) -> None:
    terms = {"quire": Terms(threads=2, work="B=8"), "vllm": Terms(threads=2, work="B=8")}
    made = row("cpu", "b8_of_its_goal", 1.5, "ratio", "vLLM", terms=terms, null=(0.98, 1.02), by="through the peer")
    results.write("cpu", [made], 5, tmp_path, code=["engine/native"])
    result = json.loads((tmp_path / "cpu.json").read_text())
    (written,) = result["rows"]
    assert written["commit"] == result["commit"]
    assert written["code"] == ["engine/native"]
    assert written["terms"]["vllm"]["threads"] == 2
    assert (written["null"], written["by"]) == ([0.98, 1.02], "through the peer")


@pytest.mark.parametrize(
    ("commit", "repetitions", "foreign", "reason"),
    [
        ("0123abc-dirty", 5, 0.0, "void: files differed from the commit"),
        ("0123abc", 4, 0.0, "void: only 4 of the 5 repetitions it needs"),
        ("0123abc", 5, 0.4, "void: other processes took 0.4 of a core"),
        ("0123abc", 5, 0.05, None),
    ],
)
def test_a_run_that_was_not_sound_meets_no_target(
    commit: str,
    repetitions: int,
    foreign: float,
    reason: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(results, "_where", lambda _: {"commit": commit})
    monkeypatch.setattr(results, "_FOREIGN_CPU", SimpleNamespace(most=foreign))
    made = row("demo", "first_token_seconds", 3.0, "s")
    assert made.met is True
    results.write("demo", [made], repetitions, tmp_path)
    (written,) = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert (written["met"], written["reason"]) == (reason is None, reason)


def test_each_program_is_first_and_last_equally_often_in_turn() -> None:
    names = ("quire", "again", "vllm")
    orders = [in_turn(names, number) for number in range(2 * len(names))]
    for place in (0, 1, 2):
        assert Counter(order[place] for order in orders) == dict.fromkeys(names, 2)
    pairs = Counter(pair for order in orders for pair in pairwise(order))
    assert max(pairs.values()) - min(pairs.values()) <= 0


def test_the_first_repetition_warms_up_and_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[int] = []
    counted = iter(range(10))

    @contextmanager
    def watch() -> Iterator[None]:
        watched.append(next(counted))
        yield

    monkeypatch.setattr(results, "_FOREIGN_CPU", SimpleNamespace(watched=watch))
    assert list(results.repeated(3, "counting")) == [0, 1, 2, 3]
    assert len(watched) == 3
    assert list(results.repeated(2, "counting", warm_up=False)) == [1, 2]
    assert len(watched) == 5


def test_a_result_holds_its_date_the_load_of_the_machine_and_the_given_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    publish("demo", [row("demo", "first_token_seconds", 3.0, "s")], 5, runs=[2.5, 3.5])
    result = json.loads((tmp_path / device_of("demo") / "demo.json").read_text())
    assert datetime.fromisoformat(result["started"]) < datetime.now(UTC)
    assert [len(result["load"][moment]) for moment in ("start", "end")] == [3, 3]
    assert result["runs"] == [2.5, 3.5]
    assert result["hardware"]["cores"] >= 1
    assert result["rows"][0]["value"] == 3.0
    assert "first_token_seconds" in capsys.readouterr().out


def test_a_machine_without_extras_prints_a_plain_table_and_no_picture(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BARE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines[0] == "cpu"
    assert lines[1].split() == ["metric", "value", "unit", "peer", "target", "met", "reason"]
    assert lines[2].split("  ")[0] == "b1_of_its_goal"
    assert len(lines) == 3
    assert json.loads((tmp_path / device_of("cpu") / "cpu.json").read_text())["seconds"] == [0.5]


def test_a_goal_is_printed_with_both_parts_and_the_one_that_counts(capsys: pytest.CaptureFixture[str]) -> None:
    reached, by = goal(1.3, 0.7)
    print_rows("cpu", [row("cpu", "b1_of_its_goal", reached, "ratio", by=by)])
    printed = "b1_of_its_goal: 1.3 of the peer, wanted 1.2; 0.7 of the ceiling, wanted 0.85: through the peer"
    assert printed in capsys.readouterr().out.splitlines()
