"""The calls of `make gpu-first`: budgets, merged results, the summary, cases, winners, and what the tools print."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.gpu_check import run
from bench.gpu_check.budgets import SECONDS
from bench.gpu_check.calls.budgets import CALLS
from bench.gpu_check.calls.merged import folder_of, merge, merged
from bench.gpu_check.calls.summary import MOST_LINES, judged_by_base, predicted, summary
from bench.gpu_check.cases import BLOCK_SIZE, batch_of
from bench.gpu_check.parts import exactness, smoke, tunings
from bench.gpu_check.parts.tunings import Winner
from bench.gpu_check.run import check_replaceable
from bench.gpu_check.tools.children import failures_in
from bench.gpu_check.tools.reports import errors_of, metrics_of
from bench.report.results import Row, row, write
from bench.report.targets import results_of
from engine.triton_kernels import tuning
from engine.triton_kernels.tuning import Tiling

CPU = torch.device("cpu")
# Rows whose predictions docs/performance.md repeats.
IN_SHORT = re.compile(r"decode_.*bandwidth|_3_8b_b\d+_(?:milli|of)|b(?:1|32)_idle|sampler_t(?:emp|op_[kp]_m)")


def result(commit: str, rows: dict[str, float], **more: Any) -> dict[str, Any]:
    listed = [{"metric": metric, "value": value} for metric, value in rows.items()]
    return {"commit": commit, "rows": listed, "raw": {}, "failures": {}} | more


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_within_ten_minutes(call: int) -> None:
    assert sum(CALLS[call].values()) == SECONDS


def test_each_row_has_the_call_that_it_came_from() -> None:
    found = merged({1: result("a", {"x": 1, "y": 1}), 3: result("b", {"y": 3})}, {})
    assert found["rows"] == [{"metric": "x", "value": 1, "call": 1}, {"metric": "y", "value": 3, "call": 3}]
    assert found["commit"] == "b"
    assert found["calls"]["1"]["commit"] == "a"


def test_failures_and_values_of_all_calls_are_kept() -> None:
    one, two = (result("a", {}, raw={name: 1}, failures={"part": name}) for name in ("x", "y"))
    found = merged({1: one, 2: two}, {})
    assert found["raw"] == {"x": 1, "y": 1}
    assert found["failures"] == {"call 1, part": "x", "call 2, part": "y"}


def test_no_call_overwrites_another_or_a_whole_check(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text(json.dumps(result("a", {"whole": 1})))
    for call in CALLS:
        folder_of(call, tmp_path).mkdir()
        (folder_of(call, tmp_path) / "gpu.json").write_text(json.dumps(result("b", {f"of_{call}": 1})))
        assert merge(tmp_path) == []
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert [row["metric"] for row in rows] == ["whole", "of_1", "of_2", "of_3"]


def test_a_file_that_is_half_written_costs_its_own_call_only(tmp_path: Path) -> None:
    for call in (1, 2):
        folder_of(call, tmp_path).mkdir()
        (folder_of(call, tmp_path) / "gpu.json").write_text(json.dumps(result("a", {f"of_{call}": 1})))
    broken = folder_of(2, tmp_path) / "gpu.json"
    broken.write_text(broken.read_text()[:40])
    (tmp_path / "gpu.json").write_text("{")
    of_call, whole = merge(tmp_path)
    assert str(broken) in of_call
    assert str(tmp_path / "gpu.json") in whole
    assert [row["metric"] for row in json.loads((tmp_path / "gpu.json").read_text())["rows"]] == ["of_1"]


def test_a_summary_fits_a_screen_with_failures_first_and_then_what_is_expected() -> None:
    rows = [Row(f"m{number}", 1.0, "ms", None, None, None) for number in range(100)]
    rows += [Row("goal", 0.5, "ratio", None, 0.8, False), Row("guess", None, "ms", None, None, None)]
    lines = summary(rows, {f"part {number}": "Error: a\nb" for number in range(50)}, {"guess": "0.2"})
    assert len(lines) == MOST_LINES
    assert lines[1] == "FAILED part 0: Error: a b"
    assert lines[30] == "... and 21 more"
    assert lines[31].endswith("target 0.8: missed")
    assert lines[32].split() == ["guess", "not", "measured", "ms", "predicted", "0.2"]
    assert lines[-1] == "... and 74 more"


@pytest.mark.parametrize("sizes", [exactness.FULL, exactness.SMALL, smoke.FULL, smoke.SMALL])
def test_the_pool_of_recorded_steps_holds_all_sequences_of_each(sizes: exactness.ExactnessSizes) -> None:
    most = max(*sizes.batches, *map(len, sizes.mixed))
    assert exactness.pool_blocks(sizes) * BLOCK_SIZE >= most * sizes.context


def test_no_case_names_a_block_outside_of_its_cache() -> None:
    lengths = (2 * BLOCK_SIZE, BLOCK_SIZE)
    assert batch_of(lengths, torch.zeros(1 + 3, 1)).tables.max() == 3
    with pytest.raises(AssertionError, match=r"blocks \[3\] outside of a pool with blocks 1 to 2"):
        batch_of(lengths, torch.zeros(1 + 2, 1))


@pytest.mark.parametrize("reason", ["void: files differed from the commit", "stale: 2 commits behind"])
def test_a_value_that_does_not_count_is_shown_with_its_reason_and_not_as_missed(reason: str) -> None:
    one = Row("decode_of_the_read_bandwidth", 0.95, "ratio", None, 0.9, False, reason=reason)
    assert summary([one], {}, predicted())[1].endswith(f"predicted 0.92 to 0.95  target 0.9: {reason}")


def test_long_names_are_shortened_in_the_middle_and_no_line_is_cut() -> None:
    reason = "void: files differed from the commit"
    name = "decode_b32_c8192_of_the_read_bandwidth_as_committed"
    line = summary([Row(name, 0.95, "ratio", None, 0.9, False, reason=reason)], {}, predicted())[1]
    assert len(line) <= 130
    assert line.startswith("decode_b32")
    assert "as_committed " in line
    assert line.endswith(reason)


def test_rows_of_tunings_have_the_prediction_and_the_target_of_the_row_that_they_repeat() -> None:
    rows = [row("gpu", f"decode_of_the_read_bandwidth{suffix}", 0.5, "ratio") for suffix in ("_as_committed", "_tuned")]
    for line in summary(judged_by_base(rows), {}, predicted())[1:]:
        assert line.endswith("predicted 0.92 to 0.95  target 0.9: missed")


def test_both_pages_have_what_is_predicted_for_the_rows() -> None:
    docs = Path(__file__).parents[2] / "docs"
    table = (docs / "benchmarking.md").read_text().partition("### Predicted")[2]
    short = " ".join((docs / "performance.md").read_text().partition("## Predicted for a GPU")[2].split())
    figures = {metric: value.removeprefix("below ").removesuffix(" %") for metric, value in predicted().items()}
    in_short = {metric for metric in figures if IN_SHORT.search(metric)}
    assert len(in_short) == 15
    assert {metric: value for metric, value in figures.items() if value not in table} == {}
    assert {metric: figures[metric] for metric in in_short if figures[metric] not in short} == {}


def test_a_summary_names_the_file_that_is_kept() -> None:
    assert summary([], {}, {}, Path("x/gpu.json")) == ["0 rows, 0 failures; all are in x/gpu.json"]
    assert summary([], {}, {}) == ["0 rows, 0 failures"]


def test_results_of_a_dry_run_are_never_shown_and_no_row_of_them_counts(tmp_path: Path) -> None:
    rows = [row("gpu", "decode_of_the_read_bandwidth", 0.99, "ratio")]
    write("gpu", rows, 20, tmp_path / "gpu", dry=True)
    written = json.loads((tmp_path / "gpu" / "gpu.json").read_text())
    assert (written["dry"], written["commit"]) == (True, None)
    assert (written["rows"][0]["met"], written["rows"][0]["commit"]) == (False, None)
    with pytest.raises(ValueError, match="of a dry run"):
        results_of("gpu", tmp_path)


def test_dry_and_real_results_are_not_merged(tmp_path: Path) -> None:
    for call, more in ((1, {}), (2, {"dry": True})):
        folder_of(call, tmp_path).mkdir()
        (folder_of(call, tmp_path) / "gpu.json").write_text(json.dumps(result("a", {"x": 1}, **more)))
    assert merge(tmp_path) == [f"{tmp_path}: it has results of a GPU and of dry runs"]
    assert not (tmp_path / "gpu.json").exists()


def test_a_run_refuses_to_replace_real_results_by_dry_ones_or_those_of_calls_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "gpu.json"
    check_replaceable(path)
    path.write_text(json.dumps({"rows": [{"metric": "x", "call": 1}]}))
    check_replaceable(path)
    with pytest.raises(SystemExit, match="CALL=merge"):
        check_replaceable(path, of_calls=False)
    monkeypatch.setattr(run, "DRY", True)
    with pytest.raises(SystemExit, match="of a GPU"):
        check_replaceable(path)


SWEPT = {
    "prefill": [[128, 64, 8, 3, 2.0], [128, 64, 8, 5, 1.0], [64, 64, 4, 5, 1.5]],
    "decode": [[16, 64, 4, 5, 1.0]],
    "split": [[2, 2, 256, 1.0], [2, 1, 256, 2.0]],
    "chunk": [[2, 2, 256, 1.0], [2, 2, 64, 0.5]],
    "swap": [[16, 1.0], [4, 1.5]],
}


def test_the_fastest_candidate_wins_and_names_the_parts_that_it_changes() -> None:
    found = tunings.winners(SWEPT)
    assert found["prefill"] == Winner((128, 64, 8, 3), (128, 64, 8, 5))
    assert [part for part in ("prefill", "decode", "swap") if tunings.changes(part, found)] == ["prefill", "decode"]


def test_winners_are_applied_to_backends_made_inside_and_taken_back() -> None:
    def applied_now() -> tuple[Any, ...]:
        constants = (tuning.PROGRAMS_PER_PROCESSOR, tuning.WAVES, tuning.MIN_CHUNK, tuning.SWAP_PROGRAMS)
        return (tuning.tiles_of(CPU)[128], *constants)

    before = applied_now()
    found = tunings.winners(SWEPT | {"swap": [[16, 1.0], [4, 0.5]]})
    with tunings.applied(found, CPU):
        assert applied_now() == ((Tiling(16, 64, 4, 5), Tiling(128, 64, 8, 5)), 2, 2, 64, 4)
    assert applied_now() == before


def test_a_sweep_without_results_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu.json").write_text('{"raw": {}}')
    monkeypatch.setenv(tunings.RESULTS_VARIABLE, str(tmp_path / "gpu.json"))
    with pytest.raises(AssertionError, match="the sweep has no results"):
        tunings._swept()


def test_errors_of_the_sanitizer_are_counted_and_unknown_if_it_was_ended() -> None:
    assert errors_of("========= ERROR SUMMARY: 3 errors\n") == 3
    assert errors_of("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n") == 2
    assert errors_of("========= ERROR SUMMARY: 0 errors\n") == 0
    assert errors_of("========= COMPUTE-SANITIZER\n") is None


def test_counters_are_read_by_kernel_from_behind_other_output() -> None:
    printed = (
        "==PROF== Connected\nrecorded\n"
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Metric Name","Metric Unit","Metric Value"\n'
        '"0","7","python","h","_prefill","gpu__time_duration.sum","ns","1,234,567"\n'
        '"1","7","python","h","scan(float*)","launch__registers_per_thread","register/thread","89"\n'
        '"1","7","python","h","scan(float*)","unknown","","n/a"\n'
    )
    assert metrics_of(printed) == {
        "_prefill": {"gpu__time_duration.sum": 1234567.0},
        "scan": {"launch__registers_per_thread": 89.0},
    }
    assert metrics_of("==ERROR== no permission\n") == {}


def test_failures_of_a_part_under_a_tool_are_found_in_its_output() -> None:
    assert failures_in('========= X\n{"failure": ["smoke", "E: no"]}\n{"raw": ["a", 1]}\n') == {"smoke": "E: no"}
